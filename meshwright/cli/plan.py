"""`meshwright plan`: the fastest layout that fits, before anything is rented.

Owns the options and the text. Must not import torch.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.output import print_json
from meshwright.errors import ConfigError
from meshwright.launching.plan import PlanOptions, question_of
from meshwright.launching.plan import plan as make_plans
from meshwright.planner.cost import cost_of, parse_tokens
from meshwright.planner.lock import LOCK_NAME
from meshwright.planner.plans import DEFAULT_COUNT, describe
from meshwright.planner.request import Request
from meshwright.planner.scaling import ScalingPoint, parse_range, scale, still_pays
from meshwright.planner.text import dollars_text


def plan(  # noqa: PLR0913 - each is an option of the command
    source: Annotated[
        str,
        typer.Argument(
            help="A model preset, a config.json of Hugging Face, run.toml, or py:module:function."
        ),
    ],
    cluster: Annotated[str, typer.Option(help="COUNTxMACHINE, e.g. 64xh100, or cluster.toml.")] = "",
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence.")] = None,
    batch: Annotated[str | None, typer.Option(help='Sequences of a step, e.g. "512 sequences".')] = None,
    fixed: Annotated[str, typer.Option("--plan", help='What is fixed, e.g. "tp=4,zero=1".')] = "",
    tokens: Annotated[str, typer.Option(help='For days and cost, e.g. "100B".')] = "",
    price: Annotated[float | None, typer.Option(min=0, help="Dollars of a device and hour.")] = None,
    headroom: Annotated[str, typer.Option(help='Memory that stays free, e.g. "10%".')] = "",
    count: Annotated[int, typer.Option(min=1, help="Plans to show.")] = DEFAULT_COUNT,
    scaling: Annotated[str, typer.Option(help="Numbers of devices to compare, e.g. 8..64.")] = "",
    out: Annotated[Path, typer.Option(help="Where the plan goes.")] = Path(LOCK_NAME),
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Search for the fastest layout that fits."""
    options: PlanOptions = {"cluster": cluster, "plan": fixed, "headroom": headroom, "count": count}
    if seq is not None:
        options["seq_len"] = seq
    if batch is not None:
        options["global_batch"] = batch
    wanted = parse_tokens(tokens) if tokens else None
    if price is not None and wanted is None:
        raise ConfigError("E285", f"--price={price:g} needs the length of the run, e.g. --tokens 100B")
    if scaling:
        _print_scaling(question_of(source, **options), scaling, wanted, price, json_output=json_output)
        return
    found = make_plans(source, **options)
    found.save(out)
    if json_output:
        value = {**found.to_json(), "seconds": found.seconds, "warnings": found.warnings, "lock": str(out)}
        if wanted is not None:
            value["cost"] = asdict(found.best.cost(wanted, usd_per_gpu_hour=price))
        print_json(value)
    else:
        print(found.table(wanted, usd_per_gpu_hour=price))
        beside = "" if out == Path(LOCK_NAME) else f" --lock {out}"
        question = "1 vs 2" if len(found.plans) > 1 else "why not zero=3"
        print(f'wrote {out}     next: meshwright explain "{question}"{beside}')
    for warning in found.warnings:
        print(warning, file=sys.stderr)


def _print_scaling(
    request: Request, text: str, tokens: float | None, price: float | None, *, json_output: bool
) -> None:
    points = scale(request, parse_range(text, request.cluster.num_devices))
    pays = still_pays(points)
    if json_output:
        print_json({"scaling": [point.to_json() for point in points], "still_pays": pays})
        return
    print(f"{'devices':>8s} {'step':>10s} {'speedup':>8s} {'efficiency':>10s}  plan")
    for point in points:
        print(_scaling_row(point, points, tokens, price))
    print(pays_text(points, pays))


def pays_text(points: tuple[ScalingPoint, ...], pays: int | None) -> str:
    """Where adding devices stops to pay, if it does."""
    if pays is None:
        return "nothing fits"
    if pays == max(point.num_devices for point in points if point.plan is not None):
        return f"adding devices pays up to {pays:,}, the end of this row"
    return f"adding devices pays up to {pays:,}: beyond, each doubling gives less than half of what it costs"


def _scaling_row(
    point: ScalingPoint, points: tuple[ScalingPoint, ...], tokens: float | None, price: float | None
) -> str:
    if point.plan is None:
        return f"{point.num_devices:8,d} {'':>10s} {'':>8s} {'':>10s}  {point.obstacle}"
    base = next(item for item in points if item.plan is not None)
    cost = cost_of(point.plan, point.request, tokens, price) if tokens else None
    days = f"  {cost.days:.1f} days {dollars_text(cost)}".rstrip() if cost else ""
    star = "*" if point.obstacle else ""
    return (
        f"{point.num_devices:8,d} {point.seconds:8.3g} s {base.seconds / point.seconds:7.2f}x "
        f"{100 * point.efficiency(base):9.0f}%  {star}{describe(point.plan.layout)}{days}"
    )
