"""GGUF files: read as a stranger's, and turned into what the decoder knows of a model."""
