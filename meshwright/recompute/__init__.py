"""Runs layers of an unmodified module again in backward instead of keeping what they saved."""
