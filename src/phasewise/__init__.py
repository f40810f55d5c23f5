"""phasewise: an LLM inference engine whose phases, prefill and decode, are values."""

__version__ = "0.1.0"
