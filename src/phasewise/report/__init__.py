"""Runs as one page: what was measured, drawn, with the command that made it."""
