"""Methods of the verb `evict`, one per file."""
