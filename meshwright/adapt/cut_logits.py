"""Logits of which each rank has its part of the vocabulary, as a tensor that any loss can take.

Owns what functions of torch do with such a tensor. A cross-entropy of class indices runs on the parts
(`tensor/vocabulary.py`): no rank ever has all logits. Shapes and scalings that leave the vocabulary alone give such a
tensor again. Everything else gathers the whole logits once, and goes on with them as a plain tensor: any loss computes
what it does on one device, only some need the memory. A hook of its gradient gets this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.comm.ops import Group
from meshwright.nested import map_values
from meshwright.tensor import uneven, vocabulary
from meshwright.tensor.vocabulary import LossTerms


class CutLogits(Tensor):
    """A tensor `(..., vocabulary)` whose memory is this rank's part `(..., n)`, `local`, a plain tensor."""

    local: Tensor
    group: Group
    sizes: Sequence[int]
    cause: str
    _whole: Tensor | None
    _is_changed: bool

    @staticmethod
    def of(local: Tensor, group: Group, sizes: Sequence[int], *, cause: str) -> CutLogits:
        """Wrap this rank's part of the logits; `sizes` are those of all ranks."""
        made = local.as_subclass(CutLogits)
        made.local, made.group, made.sizes, made.cause = local, group, sizes, cause
        made._whole, made._is_changed = None, False
        return made

    @property
    def whole_shape(self) -> torch.Size:
        """Of the logits of all ranks."""
        return torch.Size((*self.local.shape[:-1], sum(self.sizes)))

    def whole(self) -> Tensor:
        """All logits, gathered once; every rank computes the same with them."""
        if self._whole is None:
            self._whole = uneven.gather(self.local, self.group, dim=-1, sizes=self.sizes, cause=self.cause)
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What a function does with such a tensor; see the module."""
        kwargs = dict(kwargs or {})
        first = args[0] if args and isinstance(args[0], CutLogits) else None
        handler = _HANDLERS.get(func)
        if handler is not None and first is not None and not first._is_changed:
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if first is not None and _is_in_place(getattr(func, "__name__", "")):
            first._is_changed = True  # from here on it is its whole, which the function changes
        args, kwargs = map_values((tuple(args), kwargs), CutLogits, CutLogits.whole)
        return func(*args, **kwargs)

    def _like(self, local: Tensor) -> CutLogits:
        return CutLogits.of(local, self.group, self.sizes, cause=self.cause)


def _is_in_place(name: str) -> bool:
    """Whether a function of torch changes its first argument, by its name: `add_`, `__iadd__`, `__setitem__`."""
    return (
        name in ("__setitem__", "__set__")
        or (name.endswith("_") and not name.endswith("__"))
        or (
            name.startswith("__i")
            and name.endswith("__")
            and name not in ("__invert__", "__index__", "__int__")
        )
    )


def _same(func: Any, logits: CutLogits, *args: Any, **kwargs: Any) -> Any:
    """An operation on each element, or one that looks at no element."""
    if any(isinstance(value, Tensor) and value.dim() for value in (*args, *kwargs.values())):
        return NotImplemented
    result = func(logits.local, *args, **kwargs)
    return logits._like(result) if isinstance(result, Tensor) else result


def _shape(_func: Any, logits: CutLogits, *args: int) -> Any:
    return logits.whole_shape[args[0]] if args else logits.whole_shape


def _view(func: Any, logits: CutLogits, *shape: Any) -> Any:
    """A view that keeps the vocabulary as its last dim."""
    if len(shape) == 1 and isinstance(shape[0], Sequence):
        shape = tuple(shape[0])
    if not all(isinstance(size, int) for size in shape) or not shape:
        return NotImplemented
    total, ours = sum(logits.sizes), logits.local.shape[-1]
    known = shape[-1] == total or (
        shape[-1] == -1 and torch.Size(shape[:-1]).numel() == logits.local.shape[:-1].numel()
    )
    return logits._like(func(logits.local, *shape[:-1], ours)) if known else NotImplemented


def _flatten(func: Any, logits: CutLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    last = end_dim % logits.local.dim()
    if last == logits.local.dim() - 1 and start_dim % logits.local.dim() != last:
        return NotImplemented
    return logits._like(func(logits.local, start_dim, end_dim))


def _select(func: Any, logits: CutLogits, index: Any) -> Any:
    """Slices of dims before the last."""
    parts = index if isinstance(index, tuple) else (index,)
    dims = logits.local.dim()
    if any(isinstance(part, Tensor) for part in parts):
        return NotImplemented
    if parts and parts[0] is Ellipsis:
        parts = (*([slice(None)] * (dims - len(parts) + 1)), *parts[1:])
    if len(parts) == dims and parts[-1] == slice(None):
        parts = parts[:-1]
    if len(parts) >= dims or not all(isinstance(part, slice | int) for part in parts):
        return NotImplemented
    return logits._like(func(logits.local, tuple(parts)))


def _cross_entropy(  # noqa: PLR0913 - torch's signature
    _func: Any,
    logits: CutLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """The loss of class indices on the parts; other targets, weights and reductions see whole logits."""
    plain = weight is None and size_average is None and reduce is None and reduction in ("sum", "mean")
    if not plain or logits.local.dim() != 2 or target.is_floating_point():
        return NotImplemented
    total = vocabulary.summed_cross_entropy(
        logits.local,
        target,
        logits.group,
        first=sum(logits.sizes[: logits.group.index]),
        vocab_size=sum(logits.sizes),
        terms=LossTerms(ignore_index, label_smoothing),
        cause=logits.cause,
    )
    if reduction == "mean":
        total = total / (target != ignore_index).sum()
    return total.to(logits.local.dtype)


def _property(name: str) -> Any:
    return cast(Any, getattr(Tensor, name)).__get__


_HANDLERS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        F.cross_entropy: _cross_entropy,
        Tensor.view: _view,
        Tensor.reshape: _view,
        Tensor.flatten: _flatten,
        Tensor.__getitem__: _select,
        Tensor.size: _shape,
        _property("shape"): _shape,
        **dict.fromkeys(
            (
                Tensor.to,
                Tensor.float,
                Tensor.double,
                Tensor.contiguous,
                Tensor.detach,
                Tensor.dim,
                Tensor.is_floating_point,
                Tensor.is_complex,
                Tensor.__truediv__,
                Tensor.div,
                Tensor.__mul__,
                Tensor.mul,
                Tensor.register_hook,
                _property("grad_fn"),
                _property("output_nr"),
                _property("is_leaf"),
                _property("_version"),
                _property("dtype"),
                _property("device"),
                _property("ndim"),
                _property("requires_grad"),
                _property("is_cuda"),
                _property("is_meta"),
            ),
            _same,
        ),
    }
)
