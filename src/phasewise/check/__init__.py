"""Laws of determinism, asked of any OpenAI-compatible server over HTTP: `phasewise check URL`."""
