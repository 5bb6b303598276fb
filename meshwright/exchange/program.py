"""What a collective algorithm is: for each rank a list of steps, each with the messages of that step.

Owns the values that generators make, and that checker, counter, drawing and executor read. A buffer of n elements is
cut into `num_chunks` chunks, the first ones an element longer where they do not divide; a message carries a span of
neighbouring chunks. A rank posts all messages of a step at once and goes on when all have arrived; what arrives is
either stored or added, in the order in which the step lists it, so a sum has one order and repeats bit by bit.

The messages of a step read the buffer as it was before the step. A chunk that a step stores into must not be sent by
the same step: the bytes could be overwritten on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all"]


@dataclass(frozen=True)
class Span:
    """Chunks [first, stop)."""

    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True)
class Send:
    """Chunks `span` go to rank `peer`; of an all-to-all, chunks of the input buffer."""

    peer: int
    span: Span


@dataclass(frozen=True)
class Receive:
    """Chunks `span` come from rank `peer`; `adds` sums them to what is there instead of storing them."""

    peer: int
    span: Span
    adds: bool = False


@dataclass(frozen=True)
class Step:
    """Messages that a rank posts together."""

    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()


Program = tuple[Step, ...]


@dataclass(frozen=True)
class Exchange:
    """One collective over a number of ranks, carried out by one algorithm: a program for each rank.

    Attributes:
        algorithm: name of the generator, e.g. `ring`.
        collective: what it does.
        num_chunks: parts of the buffer.
        programs: steps of each rank.
        root: rank whose buffer a broadcast copies, or into which a reduce sums.
        num_servers: ranks at the end that bring no values of their own (a parameter server's).
    """

    algorithm: str
    collective: Collective
    num_chunks: int
    programs: tuple[Program, ...]
    root: int = 0
    num_servers: int = 0

    @property
    def num_ranks(self) -> int:
        """Ranks that take part, servers included."""
        return len(self.programs)

    @property
    def num_workers(self) -> int:
        """Ranks that bring values."""
        return self.num_ranks - self.num_servers


def chunk_bounds(numel: int, num_chunks: int) -> list[int]:
    """Where chunks begin, and the end: `num_chunks + 1` numbers; the first `numel % num_chunks` are one longer."""
    size, longer = divmod(numel, num_chunks)
    return [chunk * size + min(chunk, longer) for chunk in range(num_chunks + 1)]


def spans(num_chunks: int, num_parts: int) -> list[Span]:
    """Cut chunks [0, num_chunks) into `num_parts` neighbouring spans; some are empty if there are more parts."""
    bounds = chunk_bounds(num_chunks, num_parts)
    return [Span(first, stop) for first, stop in pairwise(bounds)]
