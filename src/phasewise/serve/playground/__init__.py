"""The page at `/`: a chat with the model, and what the engine does meanwhile (docs/playground.md)."""
