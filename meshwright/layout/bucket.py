"""Buckets as plain data: where each parameter lies in a flat buffer, and who owns which piece.

Owns the placement of parameters in buckets and the grouping of parameters into buckets and units. The engine
(`sharding/`) gives these numbers memory; accounting (`layout/accounting.py`) turns them into bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.layout.layout import FlatOwnership, Layout


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as numbers: its name in the model, shape, element type and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that one rank owns: flat elements [start, stop), `offset` in the shard."""

    name: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Parameters of one element type laid end to end in a flat buffer that divides by the number of ranks.

    Attributes:
        name: used in logs, e.g. `bucket 0` or `blocks.3`.
        parameters: in the order in which they lie.
        offsets: element offset of each.
        numel: padded size; zero padding fills the gaps.
        num_shards: ranks over which it is divided.
        trainable: whether its parameters get gradients.
    """

    name: str
    parameters: tuple[ParameterSpec, ...]
    offsets: tuple[int, ...]
    numel: int
    num_shards: int

    @property
    def trainable(self) -> bool:
        """Whether its parameters get gradients; a bucket never mixes."""
        return self.parameters[0].trainable

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.parameters[0].itemsize

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, padding included."""
        return self.numel // self.num_shards

    def owned(self, index: int, num_owners: int | None = None) -> list[Piece]:
        """Pieces that rank `index` of `num_owners` (default: all shards) owns, in order; empty ones left out."""
        size = self.numel // (num_owners or self.num_shards)
        first, last = index * size, (index + 1) * size
        pieces = []
        for parameter, offset in zip(self.parameters, self.offsets, strict=True):
            start, stop = max(first, offset), min(last, offset + parameter.numel)
            if start < stop:
                pieces.append(Piece(parameter.name, start - offset, stop - offset, start - first))
        return pieces

    def gaps(self) -> list[tuple[int, int]]:
        """Intervals of padding."""
        ends = [offset + p.numel for p, offset in zip(self.parameters, self.offsets, strict=True)]
        pairs = zip([0, *ends], [*self.offsets, self.numel], strict=True)
        return [(start, stop) for start, stop in pairs if start < stop]

    def layout(self, name: str, axis: str) -> Layout:
        """The layout of parameter `name` when this bucket is divided along mesh axis `axis`."""
        position = next(i for i, p in enumerate(self.parameters) if p.name == name)
        parameter, offset = self.parameters[position], self.offsets[position]
        intervals = []
        for index in range(self.num_shards):
            low = min(max(index * self.shard_numel - offset, 0), parameter.numel)
            high = min(max((index + 1) * self.shard_numel - offset, low), parameter.numel)
            intervals.append((low, high))
        return Layout(parameter.shape, flat=FlatOwnership(axis, tuple(intervals)))


@dataclass(frozen=True)
class Unit:
    """Buckets that are gathered and freed together: the parameters of one module.

    `name` is the module's name, empty for the root: parameters of no unit, or of several.
    """

    name: str
    buckets: tuple[Bucket, ...]

    @property
    def is_root(self) -> bool:
        """Whether this is the root unit."""
        return self.name == ""


def make_bucket(
    name: str, parameters: Sequence[ParameterSpec], *, num_shards: int, alignment_numel: int
) -> Bucket:
    """Lay `parameters` end to end, each start rounded up to the alignment, the total to the number of shards."""
    kinds = {(p.dtype, p.trainable) for p in parameters}
    assert len(kinds) == 1, f"bucket {name} mixes {sorted(map(str, kinds))}"
    offsets, end = [], 0
    for parameter in parameters:
        start = _round_up(end, alignment_numel)
        offsets.append(start)
        end = start + parameter.numel
    numel = _round_up(max(end, 1), num_shards * alignment_numel)
    return Bucket(name, tuple(parameters), tuple(offsets), numel, num_shards)


def group_by_size(
    parameters: Sequence[ParameterSpec], *, num_shards: int, bucket_bytes: int, alignment_numel: int
) -> tuple[Unit, ...]:
    """ddp, zero1, zero2: the root unit with buckets of about `bucket_bytes`, in reverse order of registration.

    Gradients become ready roughly in reverse order of registration, so bucket 0 is reduced first. Parameters
    that are not trained stay where they are.
    """
    buckets: list[Bucket] = []
    group: list[ParameterSpec] = []

    def close() -> None:
        if group:
            name = f"bucket {len(buckets)}"
            buckets.append(make_bucket(name, group, num_shards=num_shards, alignment_numel=alignment_numel))
            group.clear()

    for parameter in reversed([p for p in parameters if p.trainable]):
        if group and group[-1].dtype != parameter.dtype:
            close()
        group.append(parameter)
        if sum(p.numel * p.itemsize for p in group) >= bucket_bytes:
            close()
    close()
    return (Unit("", tuple(buckets)),)


def group_by_module(
    parameters: Sequence[ParameterSpec], unit_of: dict[str, str], *, num_shards: int, alignment_numel: int
) -> tuple[Unit, ...]:
    """zero3: one unit a module, the root first; `unit_of` maps parameter names to unit names (root: empty).

    A unit has one bucket for each (element type, trained or not).
    """
    names = list(dict.fromkeys(["", *(unit_of[p.name] for p in parameters)]))
    units = []
    for unit in names:
        kinds: dict[tuple[str, bool], list[ParameterSpec]] = {}
        for parameter in parameters:
            if unit_of[parameter.name] == unit:
                kinds.setdefault((parameter.dtype, parameter.trainable), []).append(parameter)
        buckets = []
        for (dtype, trainable), members in kinds.items():
            suffix = "" if len(kinds) == 1 else f" {dtype}" + ("" if trainable else " frozen")
            buckets.append(
                make_bucket(
                    (unit or "root") + suffix, members, num_shards=num_shards, alignment_numel=alignment_numel
                )
            )
        if buckets:
            units.append(Unit(unit, tuple(buckets)))
    return tuple(units)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
