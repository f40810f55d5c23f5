"""What all drafters share: the loop, tree shapes, second models that follow a request."""
