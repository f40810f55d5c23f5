"""The OpenAI-compatible server: HTTP on the event loop, one thread that does nothing but engine steps."""
