"""Sizes that a model's own code names, in calls on tensors of which a rank has a part: rewritten as they are made.

`view(B, T, 6, 4)` of hand-written attention says 6 heads where this rank has 2. Which calls of which module those are
is known from the captured graph (`partitioning/tensor_regions.py`). Owns a mode of torch's functions that is on while
such a module's own code runs, not that of modules inside it, and compares each call of a few kinds with the known ones.
What fits none of them is left alone, unless it would give wrong numbers silently: E292.

Cost: about 1 µs a torch call inside these modules, none elsewhere. Tensors stay plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.errors import PlanError
from meshwright.partitioning.tensor_regions import ShapeCall, ShapeKind, Size


@dataclass(frozen=True)
class LocalSize:
    """A size on one device and here; None: it depends on the batch."""

    whole: int | None
    local: int | None
    is_cut: bool

    def is_named_by(self, number: int) -> bool:
        """Whether code may name it so: by what it is anywhere, or from a tensor that it has."""
        return number == -1 or self.whole is None or number in (self.whole, self.local)


@dataclass(frozen=True)
class LocalCall:
    """A known call, with this rank's sizes; `ours` of `units` are here."""

    source: tuple[LocalSize, ...]
    sizes: tuple[LocalSize, ...]
    units: int
    ours: int

    def has_source(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of `shape` is its part here."""
        return len(shape) == len(self.source) and all(
            size.local is None or size.local == extent
            for size, extent in zip(self.source, shape, strict=True)
        )

    def rewritten(self, sizes: Sequence[int]) -> list[int] | None:
        """The sizes that the call must name here, or None where it is another call."""
        if len(sizes) != len(self.sizes):
            return None
        pairs = list(zip(self.sizes, sizes, strict=True))
        if not all(known.is_named_by(number) for known, number in pairs):
            return None
        return [self._here(known, number) for known, number in pairs]

    def _here(self, known: LocalSize, number: int) -> int:
        if not known.is_cut or number == -1:
            return number
        return number // self.units * self.ours if known.local is None else known.local


@dataclass(frozen=True)
class ModuleCalls:
    """The known calls of one module's own code."""

    module: str
    calls: Mapping[ShapeKind, tuple[LocalCall, ...]]

    def sizes(self, kind: ShapeKind, shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """What a call on a tensor of `shape` must name here."""
        for call in self.calls.get(kind, ()):
            if call.has_source(shape):
                found = call.rewritten(sizes)
                if found is not None:
                    return found
        if -1 in sizes and any(call.has_source(shape) for call in self.calls.get(kind, ()) if call.source):
            raise PlanError(
                "E292",
                f"plan.tp > 1: {self.module or 'the root module'} calls {kind} with {tuple(sizes)} on a tensor of "
                f"shape {tuple(shape)}, of which this rank has a part, and the graph that its layout was derived from "
                f"has no such call. Take sizes from the tensor (x.size(-1)), or name the layers in plan.layout.",
            )
        return list(sizes)


class ShapeMode(TorchFunctionMode):
    """Rewrites the calls of the module whose own code runs; one for a model."""

    def __init__(self) -> None:
        super().__init__()
        self.running: ModuleCalls | None = None
        self.is_on = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func) if self.running is not None else None
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(func, self.running, *args, **(kwargs or {}))


def local_calls(
    calls: Iterable[ShapeCall], units: int, ours: int
) -> dict[str, dict[ShapeKind, list[LocalCall]]]:
    """The calls of one region by module and kind, with this rank's sizes.

    Args:
        calls: of the region.
        units: of its axis.
        ours: how many of them this rank has.
    """

    def local(size: Size) -> LocalSize:
        here = size.whole // units * ours if size.is_cut and size.whole is not None else size.whole
        return LocalSize(size.whole, here, size.is_cut)

    found: dict[str, dict[ShapeKind, list[LocalCall]]] = {}
    for call in calls:
        here = LocalCall(tuple(map(local, call.source)), tuple(map(local, call.sizes)), units, ours)
        found.setdefault(call.module, {}).setdefault(call.kind, []).append(here)
    return found


def forwards_with_sizes(
    modules: Mapping[str, nn.Module],
    known: Mapping[str, Mapping[ShapeKind, Sequence[LocalCall]]],
    swapped: Mapping[str, Callable[..., Any]],
) -> dict[str, Callable[..., Any]]:
    """What must run instead of the forwards of modules that name sizes, and of those right inside them.

    Args:
        modules: all of the model.
        known: calls of modules, by name.
        swapped: forwards of modules that are others already.
    """
    mode = ShapeMode()
    found: dict[str, Callable[..., Any]] = {}
    inner = {
        f"{name}.{child}" if name else child
        for name in known
        for child, module in modules[name].named_children()
        if not _is_plain(module)
    }
    for name in dict.fromkeys([*known, *sorted(inner - set(swapped))]):
        calls = ModuleCalls(name, {kind: tuple(own) for kind, own in known.get(name, {}).items()})
        forward = swapped.get(name, modules[name].forward)
        found[name] = partial(_run, mode, calls if name in known else None, forward)
    return found


def _is_plain(module: nn.Module) -> bool:
    """One of torch's own layers: it names no sizes of a model, and another part may swap its forward."""
    return type(module).__module__.startswith("torch.nn.modules") and not any(True for _ in module.children())


def _run(
    mode: ShapeMode, calls: ModuleCalls | None, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A forward, with the calls of its own code known."""
    outer, mode.running = mode.running, calls
    was_on = mode.is_on
    mode.is_on = was_on or calls is not None
    try:
        with nullcontext() if was_on or calls is None else mode:
            return forward(*args, **kwargs)
    finally:
        mode.running, mode.is_on = outer, was_on


# Handlers: `(function, the running module's calls, the call's arguments) -> its result`.


def _numbers(sizes: tuple[Any, ...]) -> list[int] | None:
    """Sizes given one by one or in a sequence; None for anything else, e.g. an element type."""
    given = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    return list(given) if given and all(isinstance(number, int) for number in given) else None


def _view(func: Any, known: ModuleCalls, x: Tensor, *sizes: Any, **kwargs: Any) -> Tensor:
    numbers = _numbers(sizes or tuple(kwargs.get(name) for name in ("shape", "size") if name in kwargs))
    if numbers is None or (-1 not in numbers and math.prod(numbers) == x.numel()):
        return func(x, *sizes, **kwargs)
    return func(x, known.sizes("view", x.shape, numbers))


def _expand(func: Any, known: ModuleCalls, x: Tensor, *sizes: Any, **kwargs: Any) -> Tensor:
    numbers = _numbers(sizes or tuple(kwargs.get(name) for name in ("size", "shape") if name in kwargs))
    return func(x, *sizes, **kwargs) if numbers is None else func(x, known.sizes("expand", x.shape, numbers))


def _unflatten(func: Any, known: ModuleCalls, x: Tensor, dim: int, sizes: Any) -> Tensor:
    if not all(isinstance(number, int) for number in sizes):
        return func(x, dim, sizes)
    at = dim % x.dim()
    named = known.sizes("view", x.shape, [*x.shape[:at], *sizes, *x.shape[at + 1 :]])
    return func(x, dim, named[at : at + len(sizes)])


def _split(func: Any, known: ModuleCalls, x: Tensor, sizes: Any, dim: int = 0) -> Any:
    """Pieces of one size, or of several."""
    several = isinstance(sizes, (tuple, list))
    for call in known.calls.get("split", ()):
        cut = next(at for at, size in enumerate(call.source) if size.is_cut)
        if call.has_source(x.shape) and dim % x.dim() == cut:
            pieces = call.rewritten(sizes if several else [sizes] * len(call.sizes))
            if pieces is not None:
                return func(x, pieces if several else pieces[0], dim)
    return func(x, sizes, dim)


def _make(func: Any, known: ModuleCalls, *sizes: Any, **kwargs: Any) -> Tensor:
    numbers = _numbers(sizes or tuple(kwargs.get(name) for name in ("size",) if name in kwargs))
    if numbers is None:
        return func(*sizes, **kwargs)
    kwargs.pop("size", None)
    return func(known.sizes("make", (), numbers), **kwargs)


def _full(func: Any, known: ModuleCalls, size: Any, fill_value: Any, **kwargs: Any) -> Tensor:
    numbers = _numbers((size,))
    return func(size if numbers is None else known.sizes("make", (), numbers), fill_value, **kwargs)


def _new(func: Any, known: ModuleCalls, x: Tensor, *sizes: Any, **kwargs: Any) -> Tensor:
    return _make(partial(func, x), known, *sizes, **kwargs)


_HANDLERS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _view),
        **dict.fromkeys((Tensor.expand, Tensor.broadcast_to, torch.broadcast_to), _expand),
        **dict.fromkeys((Tensor.unflatten, torch.unflatten), _unflatten),
        **dict.fromkeys((Tensor.split, torch.split, Tensor.split_with_sizes), _split),
        **dict.fromkeys((torch.zeros, torch.ones), _make),
        torch.full: _full,
        **dict.fromkeys((Tensor.new_zeros, Tensor.new_ones), _new),
    }
)
