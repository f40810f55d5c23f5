"""Trained drafting heads: one file a kind, whose torch module trainer and drafter share; folders they lie in."""
