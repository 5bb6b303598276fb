"""Tensor parallelism: a matrix product, embedding, norm or loss on several ranks, as functions of local tensors."""
