"""`phasewise route`: one address for several servers, each request to the server that has its prefix."""
