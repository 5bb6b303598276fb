"""V-folded placement: 2P chunks on P devices, chunk k and chunk 2P-1-k on one, so that skips between them stay there.

Owns the exact search over where to fold. A device's load is its two chunks, forward and backward, and what crosses to
the devices before and after it, in both directions; a tensor crosses a border between neighbours once, however many
blocks beyond it read it. The encoder and decoder levels of a U-Net fall together, and so do both ends of a tied weight.
Simplifications: one replica a device, memory not limited; messages pass through the devices between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from meshwright.partitioning.chain import Chain, Table


@dataclass(frozen=True)
class Folded:
    """The best fold.

    Attributes:
        chunks: (first, stop) of 2P chunks in order of blocks; the one in the middle may be two halves of which one is
            empty.
        loads: seconds of each device.
        value: the longest.
    """

    chunks: tuple[tuple[int, int], ...]
    loads: tuple[float, ...]
    value: float


def fold(chain: Chain, num_devices: int, *, bandwidth: float = math.inf) -> Folded | None:
    """The fold with the least longest load; None where there are too few blocks.

    Args:
        chain: costs of one micro-batch.
        num_devices: P.
        bandwidth: bytes per second between neighbours.
    """
    n = len(chain)
    if n < 2 * num_devices or num_devices < 2:
        return None
    work = chain.forward + chain.backward
    messages = 2 * crossing(chain) / bandwidth
    # best[i, j]: least longest load of the devices from the current one on, when blocks i <= x < j are theirs
    first, stop = np.indices((n + 1, n + 1))
    inner = np.where(stop - first >= 2, work + messages, math.inf)
    tables = [inner]
    choices: list[NestedChoice] = []
    for _ in range(num_devices - 1):
        best, choice = _outer(work, messages, tables[-1])
        tables.append(best)
        choices.append(choice)
    value = float(tables[-1][0, n])
    if value == math.inf:
        return None
    return _folded(work, messages, choices[::-1])


NestedChoice = dict[tuple[int, int], tuple[int, int]]


def crossing(chain: Chain) -> Table:
    """`(n+1, n+1)`: bytes that cross between blocks first <= i < stop and the rest, each value once a direction."""
    size = len(chain) + 1
    found = np.zeros((size, size))
    first, stop = np.indices((size, size))
    for value in chain.carried:
        made_inside = (first <= value.producer) & (value.producer < stop)
        readers = [(first <= reader) & (reader < stop) for reader in value.consumers]
        inside, outside = np.logical_or.reduce(readers), ~np.logical_and.reduce(readers)
        found += value.bytes * ((made_inside & outside) + (~made_inside & inside))
    return found


def _outer(work: Table, messages: Table, inner: Table) -> tuple[Table, NestedChoice]:
    """One device around the others: its chunks are [i, i2) and [j2, j)."""
    size = len(work)
    best, choice = np.full((size, size), math.inf), NestedChoice()
    for i in range(size):
        for j in range(i + 2, size):
            loads = work[i, i + 1 : j][:, None] + work[i + 1 : j, j][None, :]
            loads = loads + messages[i, j] + messages[i + 1 : j, i + 1 : j]
            longest = np.maximum(loads, inner[i + 1 : j, i + 1 : j])
            at = int(longest.argmin())
            rows, columns = divmod(at, longest.shape[1])
            best[i, j] = longest[rows, columns]
            choice[i, j] = (i + 1 + rows, i + 1 + columns)
    return best, choice


def _folded(work: Table, messages: Table, choices: list[NestedChoice]) -> Folded:
    at = (0, len(work) - 1)
    before: list[tuple[int, int]] = []
    after: list[tuple[int, int]] = []
    loads = []
    for choice in choices:
        inside = choice[at]
        before.append((at[0], inside[0]))
        after.append((inside[1], at[1]))
        loads.append(float(work[before[-1]] + work[after[-1]] + messages[at] + messages[inside]))
        at = inside
    loads.append(float(work[at] + messages[at]))
    middle = at[0] + 1  # both halves are the innermost device's: any cut will do
    return Folded((*before, (at[0], middle), (middle, at[1]), *reversed(after)), tuple(loads), max(loads))
