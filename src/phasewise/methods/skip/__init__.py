"""Methods of the verb `skip`, one per file."""
