"""Methods of the verb `verify`, one per file."""
