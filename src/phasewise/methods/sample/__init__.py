"""Methods of the verb `sample`, one per file."""
