"""Claims of published systems, held against measurements here: one declarative file per system, one runner."""
