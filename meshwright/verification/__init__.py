"""Parallel against one device: a plain reference run, a candidate run by the product path, and the comparison.

Owns what is recorded, measured and judged. Must not know how processes are started (`launching/verify.py`) or how
results are shown beyond their text. `job`, `tensors`, `judge`, `signatures`, `cut` and `result` need no torch, so the
launcher can judge what workers measured.
"""
