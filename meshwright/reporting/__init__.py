"""A run folder as one HTML page: figures from plain data, without torch, a network or a script."""
