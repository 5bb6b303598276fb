"""Cuts of a dim that need not divide: each rank has its own chunk size, and communication is padded to the largest.

Owns nothing but the padding around the even pairs of `comm/autograd.py`, whose forwards and backwards these are.
`sizes` lists every rank's chunk, in order; a chunk may be empty. What is padded travels and is never used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.comm import autograd
from meshwright.comm.ops import Group

Sizes = Sequence[int]


def gather(x: Tensor, group: Group, *, dim: int, sizes: Sizes, cause: str) -> Tensor:
    """Concatenate every rank's chunk along `dim`; backward: this rank's slice (the later use is replicated)."""
    return _gathered(autograd.gather, x, group, dim=dim, sizes=sizes, cause=cause)


def gather_sum(x: Tensor, group: Group, *, dim: int, sizes: Sizes, cause: str) -> Tensor:
    """Concatenate every rank's chunk along `dim`; backward: reduce-scatter (each rank uses it for its own part)."""
    return _gathered(autograd.gather_sum, x, group, dim=dim, sizes=sizes, cause=cause)


def split(x: Tensor, group: Group, *, dim: int, sizes: Sizes, cause: str) -> Tensor:
    """This rank's chunk of a replicated `x`; backward: all-gather."""
    return _cut(autograd.split, x, group, dim=dim, sizes=sizes, cause=cause)


def scatter_sum(x: Tensor, group: Group, *, dim: int, sizes: Sizes, cause: str) -> Tensor:
    """This rank's chunk of the sum of all ranks' `x`; backward: all-gather."""
    return _cut(autograd.scatter_sum, x, group, dim=dim, sizes=sizes, cause=cause)


def _gathered(
    even: Callable[..., Tensor], x: Tensor, group: Group, *, dim: int, sizes: Sizes, cause: str
) -> Tensor:
    _check(x, dim, group, sizes, expected=sizes[group.index])
    if group.size == 1:
        return x
    largest = max(sizes)
    whole = even(_padded(x, dim, largest), group, dim=dim, cause=cause)
    if largest == min(sizes):
        return whole
    chunks = whole.split(largest, dim)
    return torch.cat([chunk.narrow(dim, 0, size) for chunk, size in zip(chunks, sizes, strict=True)], dim)


def _cut(
    even: Callable[..., Tensor], x: Tensor, group: Group, *, dim: int, sizes: Sizes, cause: str
) -> Tensor:
    _check(x, dim, group, sizes, expected=sum(sizes))
    if group.size == 1:
        return x
    largest = max(sizes)
    if largest != min(sizes):
        x = torch.cat([_padded(chunk, dim, largest) for chunk in x.split(list(sizes), dim)], dim)
    return even(x, group, dim=dim, cause=cause).narrow(dim, 0, sizes[group.index])


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    missing = size - x.shape[dim]
    if not missing:
        return x
    pads = [0] * (2 * x.dim())
    pads[2 * (x.dim() - 1 - dim % x.dim()) + 1] = missing
    return F.pad(x, pads)


def _check(x: Tensor, dim: int, group: Group, sizes: Sizes, *, expected: Any) -> None:
    assert len(sizes) == group.size, f"{len(sizes)} chunks for {group.size} ranks of {group.axis}"
    assert x.shape[dim] == expected, f"dim {dim} of {tuple(x.shape)} is not {expected} (chunks {sizes})"
