"""Methods of the verb `place`, one per file."""
