"""Two levels: all-reduce that sends most bytes inside a node and only a part of the buffer between nodes.

Ranks of a node reduce-scatter over their fast links, so each holds a node's sum of one part; ranks with the same part
all-reduce it over the slow links, all at once; then the nodes all-gather. The last node may have fewer ranks: then a
rank of it holds several parts.
"""

from __future__ import annotations

from meshwright.exchange.program import Program, Receive, Send, Span, Step, spans
from meshwright.exchange.ring import ring_gather, scatter_reduce


def hierarchical_chunks(num_ranks: int, ranks_per_node: int) -> int:
    """For each rank of a whole node one part, in as many chunks as there are nodes."""
    return min(ranks_per_node, num_ranks) * -(-num_ranks // ranks_per_node)


def hierarchical_program(num_ranks: int, rank: int, ranks_per_node: int) -> Program:
    """Steps of `rank` in an all-reduce over nodes of `ranks_per_node` neighbouring ranks."""
    starts = range(0, num_ranks, ranks_per_node)
    nodes = [range(first, min(first + ranks_per_node, num_ranks)) for first in starts]
    num_parts = min(ranks_per_node, num_ranks)
    node, local = divmod(rank, ranks_per_node)
    owned = [spans(num_parts, len(members)) for members in nodes]  # parts of each rank, by node
    inside = [_chunks(parts, len(nodes)) for parts in owned[node]]
    before = scatter_reduce(nodes[node], local, inside)
    after = ring_gather(nodes[node], local, inside)
    across = []
    for part in range(owned[node][local].first, owned[node][local].stop):
        peers = [
            members[next(i for i, mine in enumerate(parts) if mine.first <= part < mine.stop)]
            for members, parts in zip(nodes, owned, strict=True)
        ]
        chunks = [Span(part * len(nodes) + i, part * len(nodes) + i + 1) for i in range(len(nodes))]
        across.append(scatter_reduce(peers, node, chunks) + ring_gather(peers, node, chunks))
    return before + _together(across) + after


def _chunks(parts: Span, num_nodes: int) -> Span:
    return Span(parts.first * num_nodes, parts.stop * num_nodes)


def _together(programs: list[Program]) -> Program:
    """Rings of several parts, step by step side by side."""
    if not programs:
        return ()
    merged = []
    for steps in zip(*programs, strict=True):
        sends: list[Send] = [send for step in steps for send in step.sends]
        receives: list[Receive] = [receive for step in steps for receive in step.receives]
        merged.append(Step(tuple(sends), tuple(receives)))
    return tuple(merged)
