"""All-to-all in N - 1 steps: in step s every rank sends to the rank s further on and hears from the one s before."""

from __future__ import annotations

from meshwright.exchange.program import Collective, Program, Receive, Send, Span, Step


def pairwise_program(_collective: Collective, num_ranks: int, rank: int) -> Program:
    """Steps of `rank`; its own chunk is copied without a message."""
    steps = []
    for distance in range(1, num_ranks):
        target, source = (rank + distance) % num_ranks, (rank - distance) % num_ranks
        steps.append(
            Step(
                (Send(target, Span(target, target + 1)),),
                (Receive(source, Span(source, source + 1)),),
            )
        )
    return tuple(steps)
