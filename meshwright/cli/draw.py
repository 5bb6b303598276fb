"""`meshwright draw`: pictures of what the system does, as text on the terminal or as SVG in a file.

Owns the options and the choice of picture. Pictures stand with what they show: `exchange/draw.py`, `schedule/draw.py`,
`graph/draw.py`, `tensor/blocks.py`; traces in `simulation/trace.py`.
"""

from __future__ import annotations

import difflib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.draw_schedule import Pipeline, draw_schedule
from meshwright.cli.output import print_json
from meshwright.errors import ConfigError, writing
from meshwright.exchange.catalogue import ALGORITHMS, make_exchange
from meshwright.exchange.cost import count
from meshwright.exchange.draw import MOST_RANKS, before_and_after, step_by_step
from meshwright.exchange.draw import as_svg as exchange_svg
from meshwright.exchange.program import Collective
from meshwright.tensor.blocks import as_svg as blocks_svg
from meshwright.tensor.blocks import as_text as blocks_text
from meshwright.tensor.blocks import make_product

# What draws a collective by its own name: the algorithm that shows it best.
_SHOWN_BY: dict[str, tuple[str, Collective]] = {
    "all_reduce": ("ring", "all_reduce"),
    "reduce_scatter": ("ring", "reduce_scatter"),
    "all_gather": ("ring", "all_gather"),
    "all_to_all": ("pairwise", "all_to_all"),
    "broadcast": ("tree", "broadcast"),
    "reduce": ("tree", "reduce"),
}


def draw(  # noqa: PLR0913 - each is an option of the command
    collective: Annotated[
        str | None,
        typer.Option(help="all_reduce, all_gather ... (before and after), or ring, tree ... (step by step)."),
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="gpipe, 1f1b, interleaved, zb-v ... or your own FILE.csv, over time.")
    ] = None,
    graph: Annotated[
        str | None,
        typer.Option(help="A preset, hf:PLACE, py:MODULE:FUNCTION, FILE.onnx, or FILE.json that this wrote."),
    ] = None,
    matmul: Annotated[
        str | None, typer.Option(help="data, column, row or hybrid: blocks of one product y = x·w.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks (collectives: 4; matmul: 2, hybrid 4).")] = None,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks on one host (hierarchical).")] = 2,
    servers: Annotated[int, typer.Option(help="Servers (parameter_server).")] = 1,
    stages: Annotated[int, typer.Option(help="Ranks of the pipeline (schedules).")] = 4,
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a step (schedules).")] = 8,
    chunks: Annotated[int | None, typer.Option(help="Stages a rank (interleaved, searched).")] = None,
    times: Annotated[
        str | None,
        typer.Option(
            help="Seconds of forward/input gradient/weight gradient: 1/1/1, or by stage 1/1/1,2/2/2."
        ),
    ] = None,
    transfer: Annotated[float, typer.Option(help="Seconds of a message (schedules).")] = 0.0,
    keep: Annotated[int | None, typer.Option(help="Most activations that a rank keeps (searched).")] = None,
    replicas: Annotated[
        str | None, typer.Option(help="Ranks that share each rank's micro-batches, e.g. 1,2,2,1 (schedules).")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Samples of a micro-batch; else as many as the most replicas.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Samples (graphs).")] = 2,
    sequence: Annotated[int, typer.Option(help="Positions (graphs).")] = 64,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the picture as SVG here; a schedule also as .csv, a graph also as .json."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the planned step of a schedule for Perfetto here: .json or .json.gz."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """A collective or a product, blocks per rank; a pipeline schedule over time; or a model as a graph of tasks."""
    if [collective, schedule, graph, matmul].count(None) != 3:
        raise ConfigError(
            "E109", "draw needs one of --collective, --schedule, --graph and --matmul, e.g. --schedule 1f1b"
        )
    if trace is not None and schedule is None:
        raise ConfigError("E109", f"--trace {trace}: --trace is for schedules, e.g. --schedule 1f1b")
    suffix = "" if out is None else out.suffix
    if collective is not None:
        sizes = {"ranks": 4 if ranks is None else ranks, "ranks_per_node": ranks_per_node, "servers": servers}
        text, svg, facts = _collective(collective.replace("-", "_"), sizes)
    elif matmul is not None:
        product = make_product(matmul, (4 if matmul == "hybrid" else 2) if ranks is None else ranks)
        text, svg = blocks_text(product), blocks_svg(product)
        facts = {
            "matmul": matmul,
            "ranks": len(product.shares),
            "shares": [asdict(s) for s in product.shares],
        }
    elif graph is not None:
        from meshwright.cli.draw_graph import draw_graph

        text, svg, facts = draw_graph(graph, (batch, sequence), json=suffix == ".json")
    else:
        pipeline = Pipeline(
            name=schedule or "",
            stages=stages,
            microbatches=microbatches,
            chunks=chunks,
            times=times,
            transfer=transfer,
            keep=keep,
            replicas=replicas,
            samples=samples,
        )
        text, svg, facts = draw_schedule(pipeline, csv=suffix == ".csv", trace=trace)
    if out is not None:
        with writing(out):
            out.write_text(svg, encoding="utf-8")
    if json_output:
        print_json({**facts, "text": text, "out": None if out is None else str(out)})
    else:
        print(text if out is None else f"wrote {out}")


def _collective(wanted: str, sizes: dict[str, int]) -> tuple[str, str, dict[str, object]]:
    """Text, SVG and figures of a collective or an algorithm."""
    algorithm, operation, stepwise = _choose(wanted)
    if min(sizes.values()) < 1 or sizes["ranks"] > MOST_RANKS:
        given = " ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes.items())
        raise ConfigError(
            "E109", f"{given}: pictures show 1 to {MOST_RANKS} ranks, and each number is at least 1"
        )
    made = make_exchange(
        algorithm,
        operation,
        sizes["ranks"],
        ranks_per_node=sizes["ranks_per_node"],
        num_servers=sizes["servers"],
    )
    traffic = count(made, made.num_chunks, 1)  # a unit a chunk: what ranks move, in chunks
    facts: dict[str, object] = {
        "collective": operation,
        "algorithm": algorithm,
        "ranks": sizes["ranks"],
        "steps": traffic.steps,
        "num_chunks": made.num_chunks,
        "chunks_sent": list(traffic.sent),
        "chunks_received": list(traffic.received),
    }
    return (step_by_step(made) if stepwise else before_and_after(made)), exchange_svg(made), facts


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
