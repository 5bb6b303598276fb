"""Collective algorithms as plain data: who sends which chunk to whom in which step. No torch, no communication."""
