"""Binomial trees: broadcast, reduce, and the all-reduce that is one after the other.

The fewest steps, log2 N each way, and the whole buffer in every message: for small buffers. In round i of a
broadcast, every rank that holds the buffer gives it to the rank 2^i further on.
"""

from __future__ import annotations

from meshwright.exchange.program import Collective, Program, Receive, Send, Span, Step

_ALL = Span(0, 1)


def tree_chunks(_num_ranks: int) -> int:
    """The buffer travels whole."""
    return 1


def tree_program(collective: Collective, num_ranks: int, rank: int, root: int = 0) -> Program:
    """Steps of `rank` in a broadcast from, a reduce to, or an all-reduce through `root`."""
    down = _broadcast(num_ranks, rank, root)
    up = tuple(_reversed(step) for step in reversed(down))
    return {"broadcast": down, "reduce": up}.get(collective, up + down)


def _broadcast(num_ranks: int, rank: int, root: int) -> Program:
    position, steps = (rank - root) % num_ranks, []
    if position:
        parent = position - (1 << (position.bit_length() - 1))
        steps.append(Step(receives=(Receive((parent + root) % num_ranks, _ALL),)))
    distance = 1 << position.bit_length()
    while position + distance < num_ranks:
        steps.append(Step(sends=(Send((position + distance + root) % num_ranks, _ALL),)))
        distance *= 2
    return tuple(steps)


def _reversed(step: Step) -> Step:
    """A reduce is a broadcast backwards: what was sent comes back and is added."""
    return Step(
        tuple(Send(receive.peer, receive.span) for receive in step.receives),
        tuple(Receive(send.peer, send.span, adds=True) for send in step.sends),
    )
