"""Graphs of blocks over graphs of parts: what phase 2 works on, with costs that are passed in.

Owns the values and their elementary questions: successors, cycles, what passes between two blocks. Must not know how
blocks are chosen (`coarsen.py`, `uncoarsen.py`, `compact.py`, `segments.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.partitioning.chain import Carried

Members = tuple[int, ...]


@dataclass(frozen=True)
class BlockCosts:
    """What phase 2 asks about a set of parts.

    Attributes:
        seconds: of forward and backward together.
        communication: seconds of bytes between two blocks.
        fits: in a device's memory.
    """

    seconds: Callable[[Members], float]
    communication: Callable[[float], float] = lambda _bytes: 0.0
    fits: Callable[[Members], bool] = lambda _members: True


def additive(seconds: Sequence[float]) -> Callable[[Members], float]:
    """A set costs what its parts cost."""
    return lambda members: sum(seconds[part] for part in members)


@dataclass(frozen=True)
class Level:
    """Blocks of parts; every part is in one block.

    Attributes:
        blocks: ascending parts of each; blocks in topological order.
        carried: values between parts.
    """

    blocks: tuple[Members, ...]
    carried: tuple[Carried, ...]

    @cached_property
    def block_of(self) -> dict[int, int]:
        """Part to block."""
        return {part: number for number, members in enumerate(self.blocks) for part in members}

    @cached_property
    def between(self) -> dict[tuple[int, int], float]:
        """(from, to) to bytes; a value counts once for each block that reads it."""
        found: dict[tuple[int, int], float] = {}
        for value in self.carried:
            source = self.block_of[value.producer]
            for target in {self.block_of[reader] for reader in value.consumers} - {source}:
                found[source, target] = found.get((source, target), 0.0) + value.bytes
        return found

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Of each block, ascending."""
        found: list[list[int]] = [[] for _ in self.blocks]
        for source, target in sorted(self.between):
            found[source].append(target)
        return tuple(map(tuple, found))

    def has_detour(self, source: int, target: int) -> bool:
        """Whether a path leads from `source` to `target` over another block: merged, they would not be convex."""
        stack = [block for block in self.successors[source] if block != target]
        seen = set(stack)
        while stack:
            for block in self.successors[stack.pop()]:
                if block == target:
                    return True
                if block not in seen:
                    seen.add(block)
                    stack.append(block)
        return False


def single_parts(num_parts: int, carried: Sequence[Carried]) -> Level:
    """A block a part."""
    return Level(tuple((part,) for part in range(num_parts)), tuple(carried))


def ordered(blocks: Sequence[Members], carried: Sequence[Carried]) -> Level | None:
    """Blocks in topological order, that with the earliest part first; None where they form a cycle."""
    level = Level(tuple(blocks), tuple(carried))
    waits = [0] * len(blocks)
    for _, target in level.between:
        waits[target] += 1
    ready = [number for number, count in enumerate(waits) if not count]
    order: list[int] = []
    while ready:
        ready.sort(key=lambda number: blocks[number][0], reverse=True)
        order.append(ready.pop())
        for target in level.successors[order[-1]]:
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    if len(order) < len(blocks):
        return None
    return Level(tuple(blocks[number] for number in order), tuple(carried))
