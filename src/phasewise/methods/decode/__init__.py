"""Methods of the verb `decode`, one per file."""
