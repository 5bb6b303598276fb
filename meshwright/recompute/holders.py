"""What autograd keeps in the place of a tensor that will be computed again, and how a second run fills it.

[Note: holders] While something runs that is not to be saved, every tensor that autograd wants to keep is replaced by a
`Holder` (saved-tensor hooks). The first empty holder that backward opens makes its run happen again; the tensors that
autograd wants to keep this time fill the holders, in the same order, and the graph of the second run is thrown away.
Gradients are those of the first graph: hooks, counts and the order of collectives in backward are always the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from meshwright.errors import NumericsError
from meshwright.nested import map_tensors, map_values, storage_key


class Weights(Protocol):
    """Where weights are while layers run again."""

    def using(self, name: str) -> AbstractContextManager[None]:
        """Within it, the weights of module `name` can be read."""

    def pack(self, tensor: Tensor) -> object:
        """What to keep of a tensor that autograd saves: itself, or where a weight lies."""

    def unpack(self, packed: Any) -> Tensor:
        """The tensor again."""

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether it is a weight or a view of one."""


@dataclass(frozen=True, eq=False)
class _Kept:
    tensor: Tensor
    version: int


class StayingWeights:
    """Weights that never move.

    Args:
        model: of which they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._keys = {storage_key(parameter) for parameter in model.parameters()}

    def using(self, name: str) -> AbstractContextManager[None]:
        """See `Weights`."""
        return nullcontext()

    def pack(self, tensor: Tensor) -> object:
        """See `Weights`."""
        return _Kept(tensor, tensor._version)

    def unpack(self, packed: Any) -> Tensor:
        """See `Weights`; torch leaves the check for changes in place to whoever packs."""
        assert isinstance(packed, _Kept)
        if packed.tensor._version != packed.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(packed.tensor.shape)} that backward needs was changed in place (version "
                f"{packed.tensor._version}, saved at {packed.version}); use the operation that is not in place"
            )
        return packed.tensor

    def is_weight(self, tensor: Tensor) -> bool:
        """See `Weights`."""
        return storage_key(tensor) in self._keys


class Run(Protocol):
    """Something that ran once, and can run again.

    Attributes:
        name: for error texts.
        holders: what autograd keeps of it, in order.
    """

    name: str
    holders: list[weakref.ref[Holder]]


class Holder:
    """What autograd keeps of a tensor.

    Attributes:
        run: which makes it again.
        kind: shape and element type of the tensor, which the second run must meet.
        value: what `Weights.pack` made of it; None before the second run.
    """

    __slots__ = ("__weakref__", "kind", "run", "value")

    def __init__(self, run: Run, tensor: Tensor, value: object = None) -> None:
        self.run = run
        self.kind = (tensor.shape, tensor.dtype)
        self.value = value
        run.holders.append(weakref.ref(self))


class Enough(Exception):
    """All that backward needs has been saved: the rest need not run."""


class Collector:
    """Fills the holders of a run in the order in which autograd saves.

    Args:
        run: which.
        weights: makes values of tensors.
        ends: raise `Enough` with the last one.
    """

    def __init__(self, run: Run, weights: Weights, *, ends: bool = False) -> None:
        self._run, self._weights, self._ends = run, weights, ends
        self._number = 0

    def hooks(self) -> saved_tensors_hooks:
        """To be entered around the second run."""
        return saved_tensors_hooks(self._collect, self._weights.unpack)

    def _collect(self, tensor: Tensor) -> object:
        if self._number >= len(self._run.holders):
            raise differs(self._run, "more")
        holder = self._run.holders[self._number]()
        self._number += 1
        packed = self._weights.pack(tensor.detach())
        if holder is not None:
            if holder.kind != (tensor.shape, tensor.dtype):
                raise differs(self._run, "other")
            holder.value = packed
        if self._ends and self._number == len(self._run.holders):
            raise Enough
        return packed

    def check(self) -> None:
        """Raise E241 where autograd saved less than the first time."""
        if self._number != len(self._run.holders):
            raise differs(self._run, "fewer")


def differs(run: Run, how: str) -> NumericsError:
    """E241: a second run that is not like the first."""
    return NumericsError(
        "E241",
        f"{run.name} saved {how} tensors when it ran again than the {len(run.holders)} of its first run: its "
        f"forward depends on something that its inputs do not show. Leave it out: "
        f'plan.recompute = {{"PATTERN" = "none", ...}}.',
    )


@dataclass(frozen=True)
class Place:
    """Where a tensor stands among the arguments of a run."""

    number: int


@dataclass(eq=False)
class Input:
    """A tensor among the arguments of a run.

    Attributes:
        needs_grad: whether it wants a gradient.
        version: how often it had been changed in place.
        value: the tensor, outside of any graph; None where it is made again, or is a weight.
        source: which result makes it again.
        weight: where a weight lies: its memory may be another unit's by then (zero3).
        is_overwritten: whether the run may change it in place.
    """

    needs_grad: bool
    version: int
    value: Tensor | None
    source: int = -1
    weight: Callable[[], Tensor] | None = None
    is_overwritten: bool = False

    def again(self, made: list[Tensor], what: str) -> Tensor:
        """The tensor for a second run, outside of the first graph, wanting a gradient as the first.

        Args:
            made: results that stand in for inputs which were not kept.
            what: the run, for the error text.

        Raises:
            NumericsError: E241 where it was changed in place meanwhile.
        """
        if self.source >= 0:
            return self._fresh(made[self.source])
        if self.weight is not None:
            return self.weight().detach().requires_grad_(self.needs_grad)
        assert self.value is not None, f"an input of {what} was given up too early"
        if self.value._version != self.version:
            raise NumericsError(
                "E241",
                f"an input of {what}, of shape {tuple(self.value.shape)}, was changed in place after the first run, so "
                f"that it cannot run again. Use the operation that is not in place, or leave it out: "
                f'plan.recompute = {{"PATTERN" = "none", ...}}.',
            )
        return self._fresh(self.value)

    def _fresh(self, tensor: Tensor) -> Tensor:
        x = tensor.detach().requires_grad_(self.needs_grad)
        if not self.is_overwritten:
            return x
        with torch.enable_grad():  # a leaf must not be changed in place
            return x.clone()


@dataclass(eq=False)
class Arguments:
    """What a run was called with: a nested value with `Place`s, and the tensors."""

    value: Any
    inputs: list[Input] = field(default_factory=list)

    @classmethod
    def of(cls, value: Any, source_of: Callable[[Tensor], int], weights: Weights) -> Arguments:
        """Keep what `value` holds: tensors as they are, but weights by their place, and results by their number.

        Args:
            value: nested.
            source_of: number of the result that a tensor is; -1: none.
            weights: where they are.
        """
        inputs: list[Input] = []

        def take(tensor: Tensor) -> Place:
            source, weight, kept = source_of(tensor), None, None
            if source < 0 and weights.is_weight(tensor):
                weight = partial(weights.unpack, weights.pack(tensor.detach()))
            elif source < 0:
                kept = tensor.detach()
            inputs.append(Input(tensor.requires_grad, tensor._version, kept, source, weight))
            return Place(len(inputs) - 1)

        return cls(map_tensors(value, take), inputs)

    def again(self, made: list[Tensor], what: str) -> Any:
        """The value for a second run; see `Input.again`."""
        return placed(self.value, [x.again(made, what) for x in self.inputs])

    def copy(self) -> list[Tensor | None]:
        """Before the first run of what may change its inputs in place: keep them as they are; returns what was kept."""
        before = [x.value for x in self.inputs]
        for x in self.inputs:
            x.is_overwritten = x.weight is None
            if x.value is not None:
                x.value = x.value.clone()
                x.version = x.value._version
        return before

    def undo_copy(self, before: list[Tensor | None]) -> None:
        """It did not change them: keep what `copy` returned instead."""
        for x, value in zip(self.inputs, before, strict=True):
            x.is_overwritten = False
            if value is not None:
                x.value, x.version = value, value._version

    def linked(self, made: list[Tensor], what: str) -> Any:
        """As `again`, with results of the same run as they are, inside its graph."""
        tensors = [made[x.source] if x.source >= 0 else x.again(made, what) for x in self.inputs]
        return placed(self.value, tensors)


def placed(value: Any, tensors: list[Tensor]) -> Any:
    """`value` with each `Place` replaced by its tensor."""
    return map_values(value, Place, lambda place: tensors[place.number])


def replay(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """What puts generators and autocast back to how they are now."""
    state, kind = torch.get_rng_state(), device.type
    has_generators = kind not in ("cpu", "meta")
    ids, states = get_device_states(torch.empty(0, device=device)) if has_generators else ([], [])
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else None
    caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def entered() -> Iterator[None]:
        with torch.random.fork_rng(devices=ids, device_type=kind if ids else "cuda"):
            torch.set_rng_state(state)
            if ids:
                set_device_states(ids, states, device_type=kind)
            with torch.autocast(kind, dtype=dtype, cache_enabled=caches) if autocast else nullcontext():
                yield

    return entered
