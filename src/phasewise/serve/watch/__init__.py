"""Observability for operators: logs, metrics, events and traces."""
