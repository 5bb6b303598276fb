"""Decisions about a run as plain data: boxes, policies, buckets, plans, and the rules between them. No torch."""
