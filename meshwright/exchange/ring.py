"""Ring: every rank sends to its right neighbour only; each rank sends less than twice the buffer, however many ranks.

All-reduce is a scatter-reduce (after N - 1 steps rank r holds the sum of chunk r) and an all-gather (the sums travel
once around). Source: Patarasu and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.exchange.program import Collective, Program, Receive, Send, Span, Step


def ring_chunks(num_ranks: int) -> int:
    """One chunk a rank."""
    return num_ranks


def ring_program(collective: Collective, num_ranks: int, rank: int) -> Program:
    """Steps of `rank` in a ring all-reduce, reduce-scatter or all-gather over `num_ranks`."""
    members = range(num_ranks)
    parts = [Span(chunk, chunk + 1) for chunk in members]
    scatter = scatter_reduce(members, rank, parts) if collective != "all_gather" else ()
    gather = ring_gather(members, rank, parts) if collective != "reduce_scatter" else ()
    return scatter + gather


def scatter_reduce(members: Sequence[int], position: int, parts: Sequence[Span]) -> Program:
    """N - 1 steps after which `members[position]` holds the sum of `parts[position]`.

    The sum of part c starts at the right neighbour of its owner and comes around the ring to it.
    """
    n = len(members)
    right, left = members[(position + 1) % n], members[(position - 1) % n]
    return tuple(
        _step(right, parts[(position - s - 1) % n], left, parts[(position - s - 2) % n], adds=True)
        for s in range(n - 1)
    )


def ring_gather(members: Sequence[int], position: int, parts: Sequence[Span]) -> Program:
    """N - 1 steps that bring `parts[i]` of `members[i]` to all."""
    n = len(members)
    right, left = members[(position + 1) % n], members[(position - 1) % n]
    return tuple(
        _step(right, parts[(position - s) % n], left, parts[(position - s - 1) % n], adds=False)
        for s in range(n - 1)
    )


def _step(right: int, sent: Span, left: int, received: Span, *, adds: bool) -> Step:
    return Step(
        (Send(right, sent),) if len(sent) else (),
        (Receive(left, received, adds),) if len(received) else (),
    )
