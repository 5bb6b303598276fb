"""Batches are nested containers of tensors; this walks them and keeps their structure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `function` applied to every tensor in nested dicts, lists, tuples and named tuples."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, tuple) and type(value) is not tuple:  # a named tuple
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, function) for item in value)
    return value


def cast_batch(batch: Any, dtype: torch.dtype, device: torch.device | None = None) -> Any:
    """Floating tensors of a batch in `dtype`, all tensors on `device` (None: where they are)."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(device or tensor.device, dtype if tensor.is_floating_point() else tensor.dtype)

    return map_tensors(batch, cast)


def batch_size(batch: Any) -> int:
    """Number of samples of a collated batch: the first dim of its first tensor."""
    size = leading_size(batch)
    assert size is not None, "a batch holds a tensor with a first dim"
    return size


def leading_size(value: Any) -> int | None:
    """First dim of the first tensor in `value` that has one; None where there is none."""
    sizes: list[int] = []

    def look(tensor: Tensor) -> Tensor:
        sizes.extend(tensor.shape[:1])
        return tensor

    map_tensors(value, look)
    return sizes[0] if sizes else None


def rows_of(batch: Any, rows: slice) -> Any:
    """The samples `rows` of a collated batch; tensors of another first dim stay whole."""
    size = batch_size(batch)
    return map_tensors(batch, lambda t: t[rows] if t.dim() and t.shape[0] == size else t)
