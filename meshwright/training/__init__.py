"""The trainer: configuration, the one step, the one loop, metrics."""
