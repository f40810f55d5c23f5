"""Batches: files of requests, answered while nobody else asks, as OpenAI's /v1/files and /v1/batches are."""
