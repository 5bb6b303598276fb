"""Phase 2, second step: blocks give pieces to their neighbours where that lowers cost, from coarse to fine.

Owns the moves. A piece is what was one block at a finer level; it moves over one border if nothing of its block comes
after it (or before it, at the other end), if that is its only border, and if its block keeps something. One pass a
level, the best strictly positive gain a piece; nothing is taken back.
Source: RaNNC (arXiv 2103.16063), after Kernighan and Lin. Difference: a move that would close a cycle is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.partitioning.levels import BlockCosts, Level, Members, ordered


def uncoarsen(levels: Sequence[Level], costs: BlockCosts) -> Level:
    """The last level with its borders improved, by pieces of each level below."""
    blocks = levels[-1]
    for finer in reversed(levels[:-1]):
        blocks = _pass(blocks, finer, costs)
    return blocks


def _pass(blocks: Level, finer: Level, costs: BlockCosts) -> Level:
    for number, piece in enumerate(finer.blocks):
        best, best_gain = None, 0.0
        for target in _targets(blocks, finer, number):
            moved = _moved(blocks, piece, target)
            if moved is None:
                continue
            source = blocks.block_of[piece[0]]
            ends = (moved.block_of[piece[0]], moved.block_of[_without(blocks.blocks[source], piece)[0]])
            if not all(costs.fits(moved.blocks[end]) for end in ends):
                continue
            gain = _pair_cost(blocks, source, target, costs) - _pair_cost(moved, *ends, costs)
            if gain > best_gain * (1 + 1e-12) + 1e-15:
                best, best_gain = moved, gain
        blocks = blocks if best is None else best
    return blocks


def _targets(blocks: Level, finer: Level, number: int) -> list[int]:
    """Blocks that this piece may move to: at most one."""
    piece = finer.blocks[number]
    source = blocks.block_of[piece[0]]
    if any(blocks.block_of[part] != source for part in piece) or len(piece) == len(blocks.blocks[source]):
        return []
    after = {(n, blocks.block_of[finer.blocks[n][0]]) for n in finer.successors[number]}
    before = {
        (n, blocks.block_of[finer.blocks[n][0]])
        for n, following in enumerate(finer.successors)
        if number in following
    }
    leaving = {block for _, block in after} - {source}
    coming = {block for _, block in before} - {source}
    crossing_out = [n for n, block in after if block != source]
    crossing_in = [n for n, block in before if block != source]
    if len(crossing_out) == 1 and not crossing_in and all(block != source for _, block in after):
        return list(leaving)
    if len(crossing_in) == 1 and not crossing_out and all(block != source for _, block in before):
        return list(coming)
    return []


def _moved(blocks: Level, piece: Members, target: int) -> Level | None:
    source = blocks.block_of[piece[0]]
    changed = list(blocks.blocks)
    changed[source] = _without(changed[source], piece)
    changed[target] = tuple(sorted((*changed[target], *piece)))
    return ordered(changed, blocks.carried)


def _without(members: Members, piece: Members) -> Members:
    gone = set(piece)
    return tuple(part for part in members if part not in gone)


def _pair_cost(level: Level, left: int, right: int, costs: BlockCosts) -> float:
    size = level.between.get((left, right), 0.0) + level.between.get((right, left), 0.0)
    return costs.seconds(level.blocks[left]) + costs.seconds(level.blocks[right]) + costs.communication(size)
