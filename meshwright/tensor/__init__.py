"""Tensor parallelism: a matrix product, an embedding, a norm or a loss on several ranks, as functions of local tensors."""
