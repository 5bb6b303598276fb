"""Data: sources of samples, a stateless sample order, and the index law that cuts batches over ranks.

Owns which global sample sits in which micro-step of which rank. Must not know models, losses or process
groups. Import from the modules: `order` and `index_law` need no torch, `dataset` and `batches` do.
"""
