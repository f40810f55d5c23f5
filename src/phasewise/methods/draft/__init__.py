"""Methods of the verb `draft`, one per file."""
