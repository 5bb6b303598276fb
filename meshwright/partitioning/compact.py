"""Phase 2, third step: neighbours in topological order are merged until at most k blocks are left.

Owns the greedy merge: the cheapest block joins its cheaper neighbour. It loses balance (12 parts to 4 blocks: longest
13, where 10 is possible), so k must be several times the number of stages.
Source: RaNNC (arXiv 2103.16063). `compat`: stop at the first merge that does not fit, as RaNNC does; otherwise try the
other neighbour, then the next cheapest block.
"""

from __future__ import annotations

from meshwright.partitioning.levels import BlockCosts, Level, Members


def compact(level: Level, costs: BlockCosts, *, most_blocks: int, compat: bool = False) -> Level:
    """At most `most_blocks` blocks, unless memory forbids it."""
    blocks = list(level.blocks)
    while len(blocks) > most_blocks:
        at = _next_merge(blocks, costs, compat)
        if at is None:
            break
        blocks[at : at + 2] = [_join(blocks, at)]
    return Level(tuple(blocks), level.carried)


def _next_merge(blocks: list[Members], costs: BlockCosts, compat: bool) -> int | None:
    """The left one of the two blocks to merge."""
    seconds = [costs.seconds(members) for members in blocks]
    for number in sorted(range(len(blocks)), key=lambda n: seconds[n]):
        sides = [at for at in (number - 1, number) if 0 <= at < len(blocks) - 1]
        fitting = [at for at in sides if costs.fits(_join(blocks, at))]
        if compat and fitting != sides:
            return None
        if fitting:
            return min(fitting, key=lambda at: (costs.seconds(_join(blocks, at)), at))
    return None


def _join(blocks: list[Members], at: int) -> Members:
    return tuple(sorted((*blocks[at], *blocks[at + 1])))
