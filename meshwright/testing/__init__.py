"""Shipped test tools: a pool of warm ranks, a one-process reference, and count assertions."""
