"""Buckets as plain data: where each parameter lies in a flat buffer, and who owns which piece.

Owns the placement of parameters in buckets. Grouping them is `layout/grouping.py`'s business. The engine
(`sharding/`) gives these numbers memory; accounting (`layout/accounting.py`) turns them into bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.layout.layout import FlatOwnership, Layout

_MASTER_ITEMSIZE = 4


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as numbers.

    Attributes:
        name: in the model.
        shape: of the logical tensor.
        dtype: element type with which the model computes, and that is gathered.
        itemsize: bytes of one element.
        trainable: whether it gets a gradient.
        device: where it lies when a module spans several devices of this process; empty: the run's.
        is_hidden: whether it is a matrix of a repeated block (what Muon updates).
        has_master: whether the optimizer updates a float32 copy of it; gradients are float32 then too.
        is_partial: whether its gradient is still to be summed over the ranks of a copy of the model once a step
            (sequence parallelism), so that those ranks must cut its bucket alike.
        apart: parameters share buckets with those of the same word only: who else holds them, in a pipeline.
        even_numel: of an even part where it is one over tp, by which buckets are closed and owners chosen: alike on
            all ranks of a copy; 0: its own number of elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    trainable: bool = True
    device: str = ""
    is_hidden: bool = False
    has_master: bool = False
    is_partial: bool = False
    apart: str = ""
    even_numel: int = 0

    @property
    def planned_numel(self) -> int:
        """What it counts in a plan that ranks of a copy of the model share."""
        return self.even_numel or self.numel

    @property
    def kind(self) -> tuple[str, str, bool, bool]:
        """(device, element type, trained, partial): a bucket never mixes kinds."""
        return self.device, self.dtype, self.trainable, self.is_partial

    @property
    def gradient_kind(self) -> tuple[str, str, bool]:
        """The kind of its gradient: open gradients of one kind share buffers."""
        return self.device, "float32" if self.has_master else self.dtype, self.trainable

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def master_itemsize(self) -> int:
        """Bytes of one element of its gradient, of its optimizer state and of what the optimizer updates."""
        return _MASTER_ITEMSIZE if self.has_master else self.itemsize


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that one rank owns: flat elements [start, stop), `offset` in the shard."""

    name: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Owned:
    """One entry of a bucket's ownership list: flat elements [start, stop) of parameter `name` are `owner`'s."""

    name: str
    start: int
    stop: int
    owner: int


@dataclass(frozen=True)
class Bucket:
    """Parameters of one kind laid end to end in a flat buffer, and which rank owns which part of it.

    Attributes:
        name: used in logs, e.g. `bucket 0` or `blocks.3`.
        parameters: in the order in which they lie.
        offsets: element offset of each.
        numel: padded size; zero padding fills the gaps.
        spans: elements [start, stop) of the buffer that each rank owns, padding included; together all of it.
            Flat ownership cuts equal parts anywhere, whole ownership only where a parameter starts.
    """

    name: str
    parameters: tuple[ParameterSpec, ...]
    offsets: tuple[int, ...]
    numel: int
    spans: tuple[tuple[int, int], ...]

    @property
    def num_shards(self) -> int:
        """Ranks over which it is divided."""
        return len(self.spans)

    @property
    def trainable(self) -> bool:
        """Whether its parameters get gradients; a bucket never mixes."""
        return self.parameters[0].trainable

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.parameters[0].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.numel * self.itemsize

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates a float32 copy of it."""
        return self.parameters[0].has_master

    @property
    def master_itemsize(self) -> int:
        """Bytes of one element of gradients, optimizer state and what the optimizer updates."""
        return self.parameters[0].master_itemsize

    def shard_numel(self, index: int) -> int:
        """Elements of rank `index`'s shard, padding included."""
        start, stop = self.spans[index]
        return stop - start

    def parts(self) -> list[tuple[int, int, int]]:
        """(owner, start, stop) of every part of the buffer that is not empty."""
        return [(owner, start, stop) for owner, (start, stop) in enumerate(self.spans) if start < stop]

    def owned(self, index: int, num_owners: int | None = None) -> list[Piece]:
        """Pieces that rank `index` owns, in order, empty ones left out; with one owner it owns everything."""
        assert num_owners in (None, 1, self.num_shards), f"{num_owners} owners of {self.num_shards} shards"
        first, last = (0, self.numel) if num_owners == 1 else self.spans[index]
        pieces = []
        for parameter, offset in zip(self.parameters, self.offsets, strict=True):
            start, stop = max(first, offset), min(last, offset + parameter.numel)
            if start < stop:
                pieces.append(Piece(parameter.name, start - offset, stop - offset, start - first))
        return pieces

    def ownership(self) -> list[Owned]:
        """The ownership list: who owns which part of which parameter."""
        return [
            Owned(piece.name, piece.start, piece.stop, owner)
            for owner in range(self.num_shards)
            for piece in self.owned(owner)
        ]

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
        for start, stop in self.spans:
            low = min(max(start - offset, 0), parameter.numel)
            intervals.append((low, min(max(stop - offset, low), parameter.numel)))
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
    name: str,
    parameters: Sequence[ParameterSpec],
    *,
    num_shards: int,
    alignment_numel: int,
    owners: Mapping[str, int] | None = None,
) -> Bucket:
    """Lay `parameters` end to end, each start rounded up to the alignment.

    Args:
        name: of the bucket.
        parameters: of one kind.
        num_shards: ranks over which it is divided.
        alignment_numel: see `ShardingPolicy`.
        owners: parameter name to the rank that owns it whole, whose parameters then lie together; None: equal
            shards cut anywhere, and the total is padded to the number of ranks.
    """
    kinds = {(*parameter.kind, parameter.has_master) for parameter in parameters}
    assert len(kinds) == 1, f"bucket {name} mixes {sorted(map(str, kinds))}"
    if owners is not None:
        parameters = sorted(parameters, key=lambda parameter: owners[parameter.name])
    offsets, end = [], 0
    for parameter in parameters:
        start = _round_up(end, alignment_numel)
        offsets.append(start)
        end = start + parameter.numel
    numel = _round_up(max(end, 1), alignment_numel * (num_shards if owners is None else 1))
    if owners is None:
        spans = _equal_spans(numel, num_shards)
    else:
        spans = _whole_spans(
            [owners[p.name] for p in parameters], offsets, numel=numel, num_owners=num_shards
        )
    return Bucket(name, tuple(parameters), tuple(offsets), numel, spans)


def _equal_spans(numel: int, num_shards: int) -> tuple[tuple[int, int], ...]:
    size = numel // num_shards
    return tuple((index * size, (index + 1) * size) for index in range(num_shards))


def _whole_spans(
    owners: Sequence[int], offsets: Sequence[int], *, numel: int, num_owners: int
) -> tuple[tuple[int, int], ...]:
    """From an owner's first parameter to the next owner's first; `owners` ascend along the buffer."""
    firsts = [
        next((offset for owner, offset in zip(owners, offsets, strict=True) if owner >= index), numel)
        for index in range(num_owners)
    ]
    return tuple(zip(firsts, [*firsts[1:], numel], strict=True))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
