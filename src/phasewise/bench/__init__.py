"""Measurements: throughput and latency, over HTTP and in process; methods and engines side by side; quality."""
