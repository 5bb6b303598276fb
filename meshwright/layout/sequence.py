"""Which positions of a sequence each context-parallel rank holds, and which kinds of attention see it whole.

Owns the arithmetic: equal chunks, padding at the end, and their order. Values only; `context/` computes with them. No
torch.

[Note: zigzag] Under a causal mask later positions see more keys. The sequence is cut into 2P chunks, and rank r holds
chunks r and 2P-1-r, so that all ranks compute the same number of scores. What a rank holds is in ascending order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from meshwright.errors import PlanError

CpKind = Literal["ring", "ulysses", "allgather", "2d"]
DEFAULT_CP_KIND: CpKind = "ring"
# A run of consecutive positions, [start, stop).
Run = tuple[int, int]


@dataclass(frozen=True)
class SequenceCut:
    """A sequence cut over ranks.

    Attributes:
        length: positions that exist.
        chunk: positions of a chunk; all chunks are equal.
        chunks: numbers of the chunks that each rank holds, ascending.
    """

    length: int
    chunk: int
    chunks: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.chunks)

    @property
    def padded(self) -> int:
        """Positions with the padding at the end, which is never valid."""
        return self.chunk * sum(len(own) for own in self.chunks)

    @property
    def local_length(self) -> int:
        """Positions that a rank holds."""
        return self.chunk * len(self.chunks[0])

    def runs(self, index: int) -> tuple[Run, ...]:
        """Runs of consecutive positions of rank `index`, ascending; neighbouring chunks are one run."""
        runs: list[Run] = []
        for number in self.chunks[index]:
            start, stop = number * self.chunk, (number + 1) * self.chunk
            if runs and runs[-1][1] == start:
                start = runs.pop()[0]
            runs.append((start, stop))
        return tuple(runs)

    def runs_of_all(self) -> tuple[tuple[Run, ...], ...]:
        """`runs` of every rank."""
        return tuple(self.runs(index) for index in range(self.size))

    def merged(self, group: int) -> SequenceCut:
        """The cut over groups of `group` neighbouring ranks, which hold their chunks together."""
        firsts = range(0, self.size, group)
        together = tuple(sum(self.chunks[first : first + group], ()) for first in firsts)
        return SequenceCut(self.length, self.chunk, together)


@dataclass
class SequenceRegion:
    """What of its sequences a rank has just now; changes with every micro-batch.

    Attributes:
        index: this rank's position among those that share the sequences.
        cut: of the sequences; None: none is running.
    """

    index: int
    cut: SequenceCut | None = None


def cut_sequence(length: int, size: int, kind: CpKind, *, zigzag: bool = True) -> SequenceCut:
    """Cut `length` positions over `size` ranks as attention of `kind` wants them.

    Args:
        length: positions of the sequence.
        size: ranks.
        kind: under `ulysses` ranks hold consecutive positions; else see [Note: zigzag].
        zigzag: False gives consecutive positions to all kinds.
    """
    assert length > 0, "a sequence has at least one position"
    assert size > 0, "a sequence is cut over at least one rank"
    if kind == "ulysses" or not zigzag:
        return SequenceCut(length, -(-length // size), tuple((rank,) for rank in range(size)))
    total = 2 * size
    chunk = -(-length // total)
    heads, _ = factors(size) if kind == "2d" else (1, size)
    chunks = []
    for rank in range(size):
        ring, place = divmod(rank, heads)
        low = range(ring * heads, (ring + 1) * heads)
        both = [*low, *(total - 1 - number for number in reversed(low))]
        chunks.append(tuple(both[2 * place : 2 * place + 2]))
    return SequenceCut(length, chunk, tuple(chunks))


def padding(length: int, size: int, kind: CpKind) -> int:
    """Positions that a cut adds behind `length`."""
    return cut_sequence(length, size, kind).padded - length


def factors(size: int) -> tuple[int, int]:
    """(ranks over which heads are exchanged, ranks of each ring) of a 2-D group: as near to a square as can be."""
    heads = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
    return heads, size // heads


def check_kind(size: int, kind: CpKind | None) -> None:
    """Raise E252 for a kind that `size` ranks cannot have."""
    if kind == "2d" and factors(size)[0] == 1:
        composite = [n for n in range(4, 4 * size + 9) if factors(n)[0] > 1]
        near = sorted(sorted(composite, key=lambda n: abs(n - size))[:2])
        raise PlanError(
            "E252",
            f'plan.cp_kind = "2d" cuts heads over some ranks and the sequence over others, and plan.cp = {size} has no '
            f'two factors. Set plan.cp={" or ".join(map(str, near))}, or plan.cp_kind="ring".',
        )


def check_heads(size: int, num_heads: int, kind: CpKind) -> None:
    """Raise E252 where a rank would get no head."""
    ranks = {"ulysses": size, "2d": factors(size)[0]}.get(kind, 1)
    if ranks > num_heads:
        raise PlanError(
            "E252",
            f'plan.cp_kind = "{kind}" with plan.cp = {size} gives each of {ranks} ranks some heads of an attention '
            f'that has {num_heads} on this rank. Set plan.cp<={num_heads}, or plan.cp_kind="ring".',
        )
