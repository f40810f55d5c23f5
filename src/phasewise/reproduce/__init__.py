"""What published systems claim, held against what is measured here: one declarative file per system, one runner."""
