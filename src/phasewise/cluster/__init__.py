"""Engines in several places: workers, the lines to them, what carries KV between them, and the router above."""
