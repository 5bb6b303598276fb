"""A model as a chain of blocks with costs: what every algorithm here cuts into stages.

Owns the values: blocks, tensors that pass between blocks, weights that several blocks share, and what any cut of the
chain then sends and holds. Must not know models, devices or how the costs were found.
A branching model is a chain too: its blocks stand in an order in which each reads only from earlier ones, and a cut
sends every tensor that was made before it and is read after it (live bytes), each once, however many blocks read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
# How a tensor comes to a later stage: through all stages between, or from the stage that made it.
Routing = Literal["relay", "direct"]


@dataclass(frozen=True)
class Block:
    """Some operations that are never cut apart, for the samples that one device gets.

    Attributes:
        forward: seconds.
        backward: seconds.
        param_bytes: of weights that no other block reads.
        activation_bytes: kept from forward to backward.
        output_bytes: of what the next block reads, where no edges are given.
        name: for people.
    """

    forward: float
    backward: float
    param_bytes: float = 0.0
    activation_bytes: float = 0.0
    output_bytes: float = 0.0
    name: str = ""


@dataclass(frozen=True)
class Carried:
    """A tensor that passes from a block to later ones.

    Attributes:
        producer: block that makes it.
        consumers: blocks that read it, ascending.
        bytes: of one copy.
    """

    producer: int
    consumers: tuple[int, ...]
    bytes: float


@dataclass(frozen=True)
class Tie:
    """A weight that several blocks read; a stage with any of them holds it once.

    Attributes:
        users: blocks, ascending; at least two.
        bytes: of the weight.
        name: for people.
    """

    users: tuple[int, ...]
    bytes: float
    name: str = ""


@dataclass(frozen=True)
class Chain:
    """Blocks in order; `carried` is every tensor that one block hands to another."""

    blocks: tuple[Block, ...]
    carried: tuple[Carried, ...]
    ties: tuple[Tie, ...] = ()

    def __len__(self) -> int:
        return len(self.blocks)

    @cached_property
    def live_bytes(self) -> tuple[float, ...]:
        """For each cut 0..n, bytes made before it and read at or after it."""
        change = [0.0] * (len(self) + 2)
        for value in self.carried:
            change[value.producer + 1] += value.bytes
            change[value.consumers[-1] + 1] -= value.bytes
        found, total = [], 0.0
        for step in change[: len(self) + 1]:
            total += step
            found.append(total)
        return tuple(found)

    @cached_property
    def forward(self) -> Table:
        """`(n+1, n+1)`: seconds of the blocks first <= i < stop."""
        return _sums([block.forward for block in self.blocks])

    @cached_property
    def backward(self) -> Table:
        """As `forward`."""
        return _sums([block.backward for block in self.blocks])

    @cached_property
    def activations(self) -> Table:
        """Bytes that those blocks keep for backward."""
        return _sums([block.activation_bytes for block in self.blocks])

    @cached_property
    def params(self) -> Table:
        """Bytes of the weights of those blocks; a shared one counts once."""
        found = _sums([block.param_bytes for block in self.blocks])
        first, stop = np.indices(found.shape)
        for tie in self.ties:
            users = np.array(tie.users)
            # the first user at or after `first` lies before `stop`
            at = np.searchsorted(users, first)
            after = np.append(users, len(self) + 1)[at]
            found = found + tie.bytes * (after < stop)
        return found

    def traffic(self, routing: Routing) -> tuple[Table, Table]:
        """`(n+1, n+1)` each: bytes that a stage of blocks first <= i < stop receives, and that it sends."""
        size = len(self) + 1
        if routing == "relay":
            live = np.array(self.live_bytes)
            shape = np.ones((size, size))
            return live[:, None] * shape, live[None, :] * shape
        receives, sends = np.zeros((size, size)), np.zeros((size, size))
        for value in self.carried:
            made, readers = value.producer, np.array(value.consumers)
            at = np.searchsorted(readers, np.arange(size))
            following = np.append(readers, size)[at]  # the first reader at or after each block
            # received: made before `first`, with a reader in first <= i < stop
            receives[made + 1 :] += value.bytes * (following[made + 1 :, None] < np.arange(size)[None, :])
            # sent: made in the stage, read at or after `stop`
            sends[: made + 1, made + 1 : int(readers[-1]) + 1] += value.bytes
        return receives, sends

    def scaled(self, share: float) -> Chain:
        """What one device does that gets this share of the samples; weights stay whole."""
        blocks = tuple(
            dataclasses.replace(
                block,
                forward=block.forward * share,
                backward=block.backward * share,
                activation_bytes=block.activation_bytes * share,
                output_bytes=block.output_bytes * share,
            )
            for block in self.blocks
        )
        carried = tuple(dataclasses.replace(value, bytes=value.bytes * share) for value in self.carried)
        return Chain(blocks, carried, self.ties)


def chain_of(
    blocks: Sequence[Block],
    edges: Sequence[tuple[int, int, float]] | None = None,
    ties: Sequence[Tie] = (),
) -> Chain:
    """Blocks with edges between them.

    Args:
        blocks: in order.
        edges: (from, to, bytes), forward only; None: each block hands its `output_bytes` to the next. Edges of one
            block with equal bytes are one tensor that several blocks read.
        ties: shared weights.
    """
    if edges is None:
        edges = [(i, i + 1, block.output_bytes) for i, block in enumerate(blocks[:-1])]
    readers: dict[tuple[int, float], set[int]] = {}
    for producer, consumer, size in edges:
        assert 0 <= producer < consumer < len(blocks), (
            f"edge {producer} to {consumer} of {len(blocks)} blocks does not point forward"
        )
        readers.setdefault((producer, size), set()).add(consumer)
    carried = tuple(
        Carried(producer, tuple(sorted(found)), size) for (producer, size), found in readers.items()
    )
    return Chain(tuple(blocks), carried, tuple(ties))


def shares_of(chain: Chain, most: int) -> Mapping[int, Chain]:
    """For each number of replicas up to `most`, what one of them does: an equal part of every micro-batch."""
    return {replicas: chain.scaled(1 / replicas) for replicas in range(1, most + 1)}


def _sums(values: Sequence[float]) -> Table:
    total = np.concatenate(([0.0], np.cumsum(values)))
    return np.maximum(total[None, :] - total[:, None], 0.0)
