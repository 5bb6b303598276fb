"""The algorithms by name. A new one is a file with a generator and a line here.

Owns which algorithm carries out which collective, and E220 for what none does.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from meshwright.errors import PlanError
from meshwright.exchange.halving import halving_program, largest_power_of_two
from meshwright.exchange.hierarchical import hierarchical_chunks, hierarchical_program
from meshwright.exchange.pairwise import pairwise_program
from meshwright.exchange.program import Collective, Exchange, Program
from meshwright.exchange.ring import ring_chunks, ring_program
from meshwright.exchange.server import pull_program, push_program, server_program
from meshwright.exchange.tree import tree_chunks, tree_program


@dataclass(frozen=True)
class Algorithm:
    """A way to carry out some collectives.

    Attributes:
        name: as in `plan.sync` and `draw --collective`.
        collectives: what it carries out.
        summary: one line for people.
    """

    name: str
    collectives: tuple[Collective, ...]
    summary: str


ALGORITHMS = (
    Algorithm("ring", ("all_reduce", "reduce_scatter", "all_gather"), "neighbours only; least bytes a rank"),
    Algorithm("halving", ("all_reduce",), "recursive halving and doubling; a ring's bytes in 2·log2 N steps"),
    Algorithm("tree", ("all_reduce", "broadcast", "reduce"), "binomial tree; fewest steps, whole buffers"),
    Algorithm("hierarchical", ("all_reduce",), "rings inside nodes, then between them"),
    Algorithm("pairwise", ("all_to_all",), "a new partner each step"),
    Algorithm(
        "parameter_server", ("all_reduce", "reduce", "broadcast"), "workers push to servers, and pull the sum"
    ),
)


@dataclass(frozen=True)
class Generated:
    """How one rank gets its program without anybody else's: what an executor of thousands of ranks needs.

    Attributes:
        num_chunks: parts of the buffer.
        program: rank -> its steps.
    """

    num_chunks: int
    program: Callable[[int], Program]


def generate(
    algorithm: str,
    collective: Collective,
    num_ranks: int,
    *,
    ranks_per_node: int = 1,
    num_servers: int = 1,
    root: int = 0,
) -> Generated:
    """Programs of `algorithm` for one collective.

    Args:
        algorithm: a name of `ALGORITHMS`.
        collective: one that it carries out.
        num_ranks: ranks that bring values; servers come on top.
        ranks_per_node: neighbouring ranks on one host (hierarchical).
        num_servers: servers (parameter_server).
        root: of a broadcast or reduce; of parameter_server the number of a server.

    Raises:
        PlanError: E220 for an unknown algorithm, or a collective that it does not carry out.
    """
    known = _find(algorithm)
    if collective not in known.collectives:
        others = [other.name for other in ALGORITHMS if collective in other.collectives]
        raise PlanError(
            "E220",
            f"{algorithm} does not carry out {collective}: it does {', '.join(known.collectives)}. "
            f"For {collective} there is {' or '.join(others)}.",
        )
    match algorithm:
        case "ring":
            return Generated(ring_chunks(num_ranks), partial(ring_program, collective, num_ranks))
        case "halving":
            return Generated(largest_power_of_two(num_ranks), partial(halving_program, collective, num_ranks))
        case "tree":
            return Generated(
                tree_chunks(num_ranks), lambda rank: tree_program(collective, num_ranks, rank, root)
            )
        case "hierarchical":
            chunks = hierarchical_chunks(num_ranks, ranks_per_node)
            return Generated(chunks, lambda rank: hierarchical_program(num_ranks, rank, ranks_per_node))
        case "pairwise":
            return Generated(num_ranks, partial(pairwise_program, collective, num_ranks))
        case "parameter_server" if collective == "all_reduce":
            return Generated(num_servers, partial(server_program, num_ranks, num_servers))
        case "parameter_server":
            half = push_program if collective == "reduce" else pull_program
            return Generated(1, partial(half, num_ranks, num_ranks + root))
    raise AssertionError(f"{algorithm} is in ALGORITHMS and has no generator here")


def make_exchange(
    algorithm: str,
    collective: Collective,
    num_ranks: int,
    *,
    ranks_per_node: int = 1,
    num_servers: int = 1,
    root: int = 0,
) -> Exchange:
    """Every rank's program as one value, to check, count and draw; arguments and errors as `generate`."""
    made = generate(
        algorithm,
        collective,
        num_ranks,
        ranks_per_node=ranks_per_node,
        num_servers=num_servers,
        root=root,
    )
    servers = num_servers if algorithm == "parameter_server" else 0
    programs = tuple(made.program(rank) for rank in range(num_ranks + servers))
    at = root + num_ranks if servers else root
    return Exchange(algorithm, collective, made.num_chunks, programs, at, servers)


def _find(name: str) -> Algorithm:
    for algorithm in ALGORITHMS:
        if algorithm.name == name:
            return algorithm
    names = [algorithm.name for algorithm in ALGORITHMS]
    near = difflib.get_close_matches(name, names, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise PlanError("E220", f"unknown exchange algorithm {name!r}; known: {', '.join(names)}.{hint}")
