"""Methods of the verb `schedule`, one per file."""
