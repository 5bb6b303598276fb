"""`meshwright draw`: pictures of what the system does, as text on the terminal or as SVG in a file.

Owns the options and the choice of picture. What is drawn stands with what is drawn: `exchange/draw.py`.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.output import print_json
from meshwright.errors import ConfigError
from meshwright.exchange.catalogue import ALGORITHMS, make_exchange
from meshwright.exchange.cost import count
from meshwright.exchange.draw import MOST_RANKS, as_svg, before_and_after, step_by_step
from meshwright.exchange.program import Collective

# What draws a collective by its own name: the algorithm that shows it best.
_SHOWN_BY: dict[str, tuple[str, Collective]] = {
    "all_reduce": ("ring", "all_reduce"),
    "reduce_scatter": ("ring", "reduce_scatter"),
    "all_gather": ("ring", "all_gather"),
    "all_to_all": ("pairwise", "all_to_all"),
    "broadcast": ("tree", "broadcast"),
    "reduce": ("tree", "reduce"),
}


def draw(
    collective: Annotated[
        str,
        typer.Option(help="all_reduce, all_gather ... (before and after), or ring, tree ... (step by step)."),
    ],
    ranks: Annotated[int, typer.Option(help="Ranks that bring values.")] = 4,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks on one host (hierarchical).")] = 2,
    servers: Annotated[int, typer.Option(help="Servers (parameter_server).")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the picture as SVG here.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """A collective: blocks per rank before and after, or step by step."""
    wanted = collective.replace("-", "_")
    algorithm, operation, stepwise = _choose(wanted)
    if not 1 <= ranks <= MOST_RANKS or servers < 1 or ranks_per_node < 1:
        raise ConfigError(
            "E109",
            f"--ranks {ranks} --servers {servers} --ranks-per-node {ranks_per_node}: pictures show 1 to "
            f"{MOST_RANKS} ranks, and each number is at least 1",
        )
    made = make_exchange(algorithm, operation, ranks, ranks_per_node=ranks_per_node, num_servers=servers)
    text = step_by_step(made) if stepwise else before_and_after(made)
    if out is not None:
        out.write_text(as_svg(made), encoding="utf-8")
    if json_output:
        # Bytes of a buffer of one unit a chunk: what a rank moves, in chunks.
        traffic = count(made, made.num_chunks, 1)
        print_json(
            {
                "collective": operation,
                "algorithm": algorithm,
                "ranks": ranks,
                "steps": traffic.steps,
                "num_chunks": made.num_chunks,
                "chunks_sent": list(traffic.sent),
                "chunks_received": list(traffic.received),
                "text": text,
                "out": None if out is None else str(out),
            }
        )
        return
    print(text if out is None else f"wrote {out}")


def _choose(wanted: str) -> tuple[str, Collective, bool]:
    """Algorithm, collective, and whether to show every step."""
    if wanted in _SHOWN_BY:
        return (*_SHOWN_BY[wanted], False)
    for algorithm in ALGORITHMS:
        if algorithm.name == wanted:
            return algorithm.name, algorithm.collectives[0], True
    names = [*_SHOWN_BY, *(algorithm.name for algorithm in ALGORITHMS)]
    near = difflib.get_close_matches(wanted, names, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError("E114", f"--collective {wanted!r} is neither of {', '.join(names)}.{hint}")
