"""Models known by name: what they are, and how their files get here: once, whole and checked."""
