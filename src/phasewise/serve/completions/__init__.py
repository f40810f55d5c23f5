"""OpenAI's two generating endpoints, and what the other surfaces share with them: asks, answers, streams."""
