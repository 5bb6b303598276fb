"""Batches: nested containers of tensors with samples along their first dim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.nested import map_tensors


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
