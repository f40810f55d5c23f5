"""Parses tool calls and reasoning out of a model's text while it arrives."""
