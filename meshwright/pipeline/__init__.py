"""A model as stages: recorded once a shape, cut anywhere between its modules, run by a schedule."""
