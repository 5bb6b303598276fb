"""Blocks by the cheapest cuts: neighbours in order, none longer than a bound, as few bytes as possible between them.

Owns this other way to phase 2, which needs no merging: the sum of live bytes over all cuts is least among all ways to
cut the chain into blocks of at most `longest` seconds (a single part may be longer). Cost: one pass with a sliding
minimum. In a transformer that cuts between sublayers, where only the hidden state passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_TINY = 1e-12


def cheapest_cuts(
    seconds: Sequence[float], live_bytes: Sequence[float], *, longest: float
) -> tuple[int, ...]:
    """Where blocks start, 0 first; of equal sums the one with fewer cuts, then with later ones.

    Args:
        seconds: of each part.
        live_bytes: at each cut 0..n.
        longest: seconds of a block.
    """
    n = len(seconds)
    ends = [0.0]
    for value in seconds:
        ends.append(ends[-1] + value)
    # (bytes, cuts) of the best way to the parts before each cut, and the cut before that one
    cost: list[tuple[float, int]] = [(0.0, 0)]
    back = [0]
    window: deque[int] = deque([0])
    for stop in range(1, n + 1):
        # a part that is longer than the bound stands alone
        while len(window) > 1 and ends[stop] - ends[window[0]] > longest * (1 + _TINY):
            window.popleft()
        first = window[0]
        back.append(first)
        cost.append((cost[first][0] + live_bytes[stop], cost[first][1] + 1))
        while window and cost[window[-1]] >= cost[stop]:
            window.pop()
        window.append(stop)
    starts = []
    at = n
    while at:
        at = back[at]
        starts.append(at)
    return tuple(reversed(starts))
