"""Methods of the verb `store`, one per file."""
