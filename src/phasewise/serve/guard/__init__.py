"""Access to the server: API keys, limits, and the count of what each key uses."""
