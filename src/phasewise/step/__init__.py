"""One pass of the model over the ragged rows of many requests."""
