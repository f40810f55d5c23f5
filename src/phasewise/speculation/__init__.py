"""The parts that drafters share: the loop, tree shapes, second models that follow a request."""
