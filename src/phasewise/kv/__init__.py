"""Cached keys and values: rows of one request at one layer, their byte budget, shared prefixes, and hand-off."""
