"""Planning: profiles of what steps cost, and a simulator of clusters under a load."""
