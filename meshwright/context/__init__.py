"""Attention over a sequence that is cut over ranks: pure functions over a group, one file a kind."""
