"""A request: what was asked, its progress, its text, its times and counters."""
