"""CacheGen's own: rows cut into chunks, rounded by levels, coded at about their entropy, and paced by a deadline."""
