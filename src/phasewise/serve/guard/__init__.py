"""Who may ask, for how much, and how it is kept count of."""
