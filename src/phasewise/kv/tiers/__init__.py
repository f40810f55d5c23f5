"""Prefix blocks beyond the engine's budget: kept in memory, and in a folder that outlives the process."""
