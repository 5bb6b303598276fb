"""Recursive halving and doubling: all-reduce in 2·log2 N steps with a ring's bytes.

In each step of the first half a rank exchanges half of what it still sums with a partner at half the distance; the
second half runs backwards. Beyond a power of two, N - P ranks first give their buffer to a neighbour and get the
result back at the end. Source: Rabenseifner, Optimization of collective reduction operations, ICCS 2004.
"""

from __future__ import annotations

from meshwright.exchange.program import Collective, Program, Receive, Send, Span, Step


def largest_power_of_two(number: int) -> int:
    """The largest power of two that is at most `number`."""
    return 1 << (number.bit_length() - 1)


def halving_program(_collective: Collective, num_ranks: int, rank: int) -> Program:
    """Steps of `rank` in an all-reduce over `num_ranks`; chunks: the largest power of two in `num_ranks`."""
    power = largest_power_of_two(num_ranks)
    paired, everything = 2 * (num_ranks - power), Span(0, power)
    if rank < paired and rank % 2 == 0:
        return (Step(sends=(Send(rank + 1, everything),)), Step(receives=(Receive(rank + 1, everything),)))
    inner = _core(power, _position(rank, paired), paired)
    if rank >= paired:
        return inner
    before = Step(receives=(Receive(rank - 1, everything, adds=True),))
    return (before, *inner, Step(sends=(Send(rank - 1, everything),)))


def _position(rank: int, paired: int) -> int:
    """Number of `rank` among those that take part in the halving."""
    return rank // 2 if rank < paired else rank - paired // 2


def _rank(position: int, paired: int) -> int:
    return 2 * position + 1 if position < paired // 2 else position + paired // 2


def _core(power: int, position: int, paired: int) -> Program:
    steps: list[Step] = []
    mine, distance = Span(0, power), power // 2
    while distance:  # halve: keep the half that this position's bit names, sum the partner's values into it
        middle = (mine.first + mine.stop) // 2
        low, high = Span(mine.first, middle), Span(middle, mine.stop)
        kept, given = (high, low) if position & distance else (low, high)
        peer = _rank(position ^ distance, paired)
        steps.append(Step((Send(peer, given),), (Receive(peer, kept, adds=True),)))
        mine, distance = kept, distance // 2
    distance = 1
    while distance < power:  # double: what the partner summed is the other half
        other = Span(mine.first ^ distance, (mine.first ^ distance) + distance)
        peer = _rank(position ^ distance, paired)
        steps.append(Step((Send(peer, mine),), (Receive(peer, other),)))
        mine, distance = Span(min(mine.first, other.first), max(mine.stop, other.stop)), 2 * distance
    return tuple(steps)
