"""Phase 2, first step: neighbours are merged in pairs, level by level, as RaNNC does it.

Owns the matching. Cheapest block first, it joins a successor; the gain is the communication that is saved (and what
the merged block saves). A merged block that costs more than mean + 2 sigma is refused; above 200 blocks the two alone
are looked at. Where blocks are near equal, sigma is near zero, every merge is refused, and `compact.py` does the work.
Source: RaNNC (arXiv 2103.16063), block-level partitioning. Seconds are whole (microseconds there); ties of the order
go to the earlier block. Difference: a candidate without gain is not taken.
"""

from __future__ import annotations

import math

from meshwright.partitioning.levels import BlockCosts, Level, Members, ordered

_MANY = 200


def coarsen(level: Level, costs: BlockCosts, *, min_blocks: int = 5) -> tuple[Level, ...]:
    """The given level, and one after each round that merged something."""
    levels = [level]
    while len(levels[-1].blocks) > max(min_blocks, 3):
        merged = _merge_neighbours(levels[-1], costs, min_blocks)
        if len(merged.blocks) == len(levels[-1].blocks):
            break
        levels.append(merged)
    return tuple(levels)


def _merge_neighbours(level: Level, costs: BlockCosts, min_blocks: int) -> Level:
    seconds = [costs.seconds(members) for members in level.blocks]
    mean = sum(seconds) / len(seconds)
    sigma = int(math.sqrt(sum((t - mean) ** 2 for t in seconds) / len(seconds)))
    limit = mean + 2 * sigma
    unmatched = set(range(len(level.blocks)))
    pairs: list[tuple[Members, ...]] = []
    for block in sorted(range(len(seconds)), key=lambda number: seconds[number]):
        if block not in unmatched:
            continue
        partner = None
        if len(unmatched) + len(pairs) > min_blocks:
            partner = _partner(level, costs, seconds, (block, limit), unmatched)
        unmatched -= {block, partner}
        pairs.append(tuple(level.blocks[number] for number in (block, partner) if number is not None))
    return _without_cycles(level, pairs)


def _partner(
    level: Level,
    costs: BlockCosts,
    seconds: list[float],
    wanted: tuple[int, float],
    unmatched: set[int],
) -> int | None:
    """The successor to merge with, or None; of equal gains the later one."""
    block, limit = wanted
    best, best_gain = None, -1.0
    for other in level.successors[block]:
        if other not in unmatched or level.has_detour(block, other):
            continue
        merged = 0.0
        joined = _join(level.blocks[block], level.blocks[other])
        if len(level.blocks) > _MANY:
            if max(seconds[block], seconds[other]) > limit:
                continue
        else:
            merged = costs.seconds(joined)
            if merged > limit or not costs.fits(joined):
                continue
        gain = seconds[block] + seconds[other] + costs.communication(level.between[block, other]) - merged
        if gain >= max(best_gain, 0.0):
            best, best_gain = other, gain
    return best


def _without_cycles(level: Level, pairs: list[tuple[Members, ...]]) -> Level:
    """Two merges of one round can close a cycle that neither closes alone: then the later one is undone."""
    while True:
        found = ordered([_join(*pair) if len(pair) == 2 else pair[0] for pair in pairs], level.carried)
        if found is not None:
            return found
        last = max(number for number, pair in enumerate(pairs) if len(pair) == 2)
        pairs[last : last + 1] = [(members,) for members in pairs[last]]


def _join(left: Members, right: Members) -> Members:
    return tuple(sorted((*left, *right)))
