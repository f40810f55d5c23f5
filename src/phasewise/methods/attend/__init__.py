"""Methods of the verb `attend`, one per file."""
