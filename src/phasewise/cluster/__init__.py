"""Engines in several places: workers, the connection to them, what carries KV between them, and the router above."""
