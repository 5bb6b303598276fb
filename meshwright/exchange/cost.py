"""What an exchange costs: steps, bytes of each rank, the busiest rank, and time on a given link.

`count` reads the programs of every rank; `formula` states the same in closed form, for any number of ranks, and tests
hold one against the other. With S bytes over N ranks (P the largest power of two in N, L = ceil(log2 N), k ranks a node
on H nodes, W workers and K servers):

| algorithm | collective | steps | most bytes a rank that brings values sends | bytes of the busiest rank |
|---|---|---|---|---|
| ring | all_reduce | 2(N-1) | 2(N-1)/N·S | the same |
| ring | reduce_scatter, all_gather | N-1 | (N-1)/N·S | the same |
| halving | all_reduce | 2·log2 P, + 2 if N > P | 2(P-1)/P·S, + S if N > P | the same |
| tree | broadcast | L | L·S (the root) | the same |
| tree | reduce | L | S | L·S (the root) |
| tree | all_reduce | 2L | L·S (the root) | the same |
| hierarchical | all_reduce | 2(k-1) + 2(H-1) | 2(k-1)/k·S + 2(H-1)/H·S/k | the same |
| pairwise | all_to_all | N-1 | (N-1)/N·S | the same |
| parameter_server | all_reduce | W + 1 | S | W·S/K (a server) |
| parameter_server | reduce (a push) | W | S | W·S (its server) |
| parameter_server | broadcast (a pull) | 1 | 0 | W·S (its server) |

Simplifications of the time: a link carries both directions at full rate, messages of different ranks do not slow each
other, and adding costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.exchange.check import rounds_of
from meshwright.exchange.halving import largest_power_of_two
from meshwright.exchange.program import Collective, Exchange, Span, chunk_bounds
from meshwright.presets.machines import Link


@dataclass(frozen=True)
class Traffic:
    """What an exchange moves, counted.

    Attributes:
        steps: rounds until the last rank is done.
        sent: bytes that each rank sends.
        received: bytes that each rank receives.
        num_workers: ranks that bring values; the rest are servers.
    """

    steps: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    num_workers: int

    @property
    def of_a_worker(self) -> int:
        """Most bytes that a rank that brings values sends."""
        return max(self.sent[: self.num_workers], default=0)

    @property
    def busiest(self) -> int:
        """Bytes of the busiest rank in its busier direction."""
        return max((*self.sent, *self.received), default=0)


@dataclass(frozen=True)
class Cost:
    """What an exchange costs by its formula.

    Attributes:
        steps: rounds until the last rank is done.
        of_a_worker: most bytes that a rank that brings values sends.
        busiest: bytes of the busiest rank in its busier direction.
        in_line: bytes that follow each other on the longest path.
    """

    steps: int
    of_a_worker: float
    busiest: float
    in_line: float

    def seconds(self, link: Link) -> float:
        """Time when every rank has one such link."""
        return self.steps * link.latency_seconds + self.in_line / link.bandwidth_bytes_per_second


def count(exchange: Exchange, numel: int, itemsize: int) -> Traffic:
    """Read the traffic of a buffer of `numel` elements of `itemsize` bytes from a right exchange's programs."""
    bounds = chunk_bounds(numel, exchange.num_chunks)

    def nbytes(span: Span) -> int:
        return (bounds[span.stop] - bounds[span.first]) * itemsize

    programs = exchange.programs
    sent = tuple(sum(nbytes(m.span) for step in program for m in step.sends) for program in programs)
    received = tuple(sum(nbytes(m.span) for step in program for m in step.receives) for program in programs)
    return Traffic(len(rounds_of(exchange)) - 1, sent, received, exchange.num_workers)


def formula(
    algorithm: str,
    collective: Collective,
    num_ranks: int,
    nbytes: float,
    *,
    ranks_per_node: int = 1,
    num_servers: int = 1,
) -> Cost:
    """The closed form for `nbytes` over `num_ranks` ranks that bring values.

    Args:
        algorithm: a name of the catalogue that carries out `collective`.
        collective: which.
        num_ranks: ranks that bring values.
        nbytes: of the buffer; of its largest tensor for a reduce-scatter and an all-gather.
        ranks_per_node: ranks on one host (hierarchical); the formula is for whole nodes.
        num_servers: servers (parameter_server).
    """
    n, s = num_ranks, nbytes
    depth = (n - 1).bit_length()
    if algorithm == "parameter_server" and collective != "all_reduce":
        pushes = collective == "reduce"
        return Cost(n if pushes else 1, s if pushes else 0, n * s, n * s)
    if algorithm == "parameter_server":
        through = n * s / num_servers
        return Cost(n + 1, s, max(through, s), 2 * through)
    if algorithm == "tree":
        if collective == "all_reduce":
            return Cost(2 * depth, depth * s, depth * s, 2 * depth * s)
        sent = min(depth, 1) * s if collective == "reduce" else depth * s
        return Cost(depth, sent, depth * s, depth * s)
    if algorithm == "halving":
        power = largest_power_of_two(n)
        folded = n > power
        moved = 2 * (power - 1) / power * s
        return Cost(
            2 * (power.bit_length() - 1) + 2 * folded,
            moved + folded * s,
            moved + folded * s,
            moved + 2 * folded * s,
        )
    if algorithm == "hierarchical":
        k = min(ranks_per_node, n)
        nodes = -(-n // k)
        moved = 2 * (k - 1) / k * s + 2 * (nodes - 1) / nodes * s / k
        return Cost(2 * (k - 1) + 2 * (nodes - 1), moved, moved, moved)
    halves = 2 if collective == "all_reduce" else 1
    moved = halves * (n - 1) / n * s
    return Cost(halves * (n - 1), moved, moved, moved)
