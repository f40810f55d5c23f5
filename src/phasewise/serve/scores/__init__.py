"""Endpoints that generate nothing: scores, rankings, embeddings."""
