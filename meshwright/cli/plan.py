"""`meshwright plan`: the fastest layout that fits, before anything is rented.

Owns the options and the text. Must not import torch.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.output import print_json
from meshwright.planner.asking import ask, sections_of
from meshwright.planner.cost import Cost, cost_of, parse_tokens
from meshwright.planner.lock import LOCK_NAME, save_lock
from meshwright.planner.plans import DEFAULT_COUNT, Plan, Plans, describe, make_plans, rank_order
from meshwright.planner.request import Request
from meshwright.planner.scaling import ScalingPoint, parse_range, scale, still_pays
from meshwright.presets.counts import num_parameters
from meshwright.simulation.job import Cluster, num_microbatches
from meshwright.simulation.reading import plan_values

_BAR = 9
_GIB = 2**30


def plan(  # noqa: PLR0913 - each is an option of the command
    source: Annotated[
        str, typer.Argument(help="A model preset, a config.json of Hugging Face, or run.toml.")
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
    started = time.perf_counter()
    request = read_request(source, cluster, fixed, seq=seq, batch=batch, headroom=headroom)
    wanted = parse_tokens(tokens) if tokens else None
    if scaling:
        _print_scaling(request, scaling, wanted, price, json_output=json_output)
        return
    request = at_home(request)
    found = make_plans(request, count=count)
    seconds = time.perf_counter() - started
    save_lock(out, found, source=source)
    warnings = warnings_of(found)
    if json_output:
        value = {**found.to_json(), "seconds": seconds, "warnings": warnings, "lock": str(out)}
        if wanted is not None:
            value["cost"] = asdict(cost_of(found.best.predicted, request, wanted, price))
        print_json(value)
    else:
        print("\n".join(_text(found, seconds, wanted, price, out)))
    for warning in warnings:
        print(warning, file=sys.stderr)


def read_request(
    source: str, cluster: str, fixed: str, *, seq: int | None, batch: str | None, headroom: str
) -> Request:
    """The question that the options and a run file put together.

    Raises:
        ConfigError: E104 for an unknown model or machine, E282 without a cluster, E283, E285, E287.
    """
    if source.endswith(".toml"):
        from meshwright.training.config import load_config

        sections = sections_of(load_config(Path(source)))
    else:
        is_file = source.endswith(".json") or Path(source).is_dir()
        name = f"hf:{source}" if is_file else f"preset:{source.removeprefix('preset:')}"
        sections = {"model": {"source": name}}
    options = {"cluster": cluster, "memory_headroom": headroom}
    given = {key: value for key, value in options.items() if value}
    return ask(sections, {**given, **plan_values(fixed)}, seq=seq, batch=batch)


def at_home(request: Request) -> Request:
    """The question with this host as it was measured, where its processes are the cluster; measured now if torch is
    here."""
    from meshwright.launching.this_host import located
    from meshwright.training.config import default_cache_dir

    return located(request, default_cache_dir(), measures=importlib.util.find_spec("torch") is not None)


def warnings_of(found: Plans) -> list[str]:
    """What a reader must know of these plans."""
    texts, first = [], found.best
    machine = found.request.cluster.machine.name
    if first.obstacle:
        texts.append(
            f"W283 no plan that fits can be trained today: {first.obstacle}; the first one is for comparison"
        )
    fastest = min(found.plans, key=lambda item: item.predicted.step.total)
    if fastest is not first and not first.obstacle:
        gain = 100 * (1 - fastest.predicted.step.total / first.predicted.step.total)
        texts.append(f"W284 a plan that train does not run today is {gain:.0f} % faster: {fastest.obstacle}")
    if machine == "cpu" and found.request.cluster.host is None:
        texts.append(
            "W285 this host was not measured for the model: nominal figures are taken. With torch installed "
            "`meshwright plan` measures; `meshwright doctor --measure` does it anew"
        )
    elif not first.predicted.is_fitted:
        texts.append(
            f"W281 {machine} has no constants of its own yet: those of the nearest machine are taken"
        )
    return texts


# How far predicted step times were off: docs/simulation.md, benchmarks/RESULTS.md.
_PUBLISHED = (
    "Of published runs on A100 and H100 half are within 7 % of the predicted time, 9 of 10 within 18 %."
)
_MEASURED_HERE = (
    "Of 25 plans measured on 2 cores half are within 7 % of the measured time, the worst 27 % below it."
)


def _text(found: Plans, seconds: float, tokens: float | None, price: float | None, out: Path) -> list[str]:
    request = found.request
    work, where = request.work, request.cluster
    usable = request.usable_bytes / _GIB
    refused = " · ".join(
        f"{count:,} {reason}"
        for reason, count in sorted(found.rejected.items(), key=lambda pair: -pair[1])[:3]
    )
    lines = [
        f"model    {work.model.name}    {num_parameters(work.model) / 1e9:.3g} B params · {work.model.num_layers} "
        f"layers · {work.model.num_heads} heads ({work.model.num_kv_heads} kv) · vocab {work.model.vocab_size:,}",
        f"cluster  {where.num_devices:,} x {where.machine.name}    {_cluster_text(where)}",
        f"batch    {work.global_batch:,} x {work.seq_len:,} = {work.global_batch * work.seq_len / 1e6:.3g} M tokens "
        f"a step · {found.best.layout.precision} compute, fp32 state",
        *_host_lines(where),
        f"searched {found.searched:,} in {seconds:.1f} s: {found.priced:,} priced · {refused}",
        f"    {'plan':52s} {'step':>9s} {'tok/s/GPU':>9s} {'MFU':>6s}  peak of {usable:.1f} GiB"
        + (f"  {'days':>6s} {'cost':>9s}" if tokens else ""),
    ]
    for at, item in enumerate(found.plans):
        cost = cost_of(item.predicted, request, tokens, price) if tokens else None
        lines.append(_row(at, item, usable, cost))
    lines += [f"  {at + 1}   {item.why}" for at, item in enumerate(found.plans)]
    best = found.best
    memory = {key: value / _GIB for key, value in asdict(best.predicted.memory).items() if value}
    lines += [
        "memory   " + " · ".join(f"{key} {value:.1f}" for key, value in memory.items()) + " GiB",
        f"ranks    inside out: {rank_order(best.layout)} · batch {work.global_batch} = dp {best.layout.dp} x micro "
        f"{best.layout.micro_batch} x {num_microbatches(work, best.layout)}",
        "front    "
        + " · ".join(f"{item.seconds:.3g} s {item.bytes / _GIB:.0f} GiB" for item in found.front[:6]),
        f"* train does not run it today (--json: obstacle). {_PUBLISHED if where.host is None else _MEASURED_HERE}",
        f'wrote {out}     next: meshwright explain "1 vs 2"'
        + ("" if out == Path(LOCK_NAME) else f" --lock {out}"),
    ]
    return lines


def _host_lines(where: Cluster) -> list[str]:
    """What is known of this host, and what runs taught."""
    if where.host is None:
        return []
    own = where.host
    lines = [
        f"host     {own.name}, measured: {own.cores} cores · {own.process_bytes / 2**20:.0f} MiB a process"
    ]
    taught = own.learned
    if taught.runs:
        ratios = {name: value for name, value in asdict(taught).items() if name != "runs"}
        text = " · ".join(f"{name} x {value:.2f}" for name, value in ratios.items())
        lines.append(f"learned  {text}   from {taught.runs} runs here, measured over predicted")
    return lines


def _cluster_text(where: Cluster) -> str:
    nodes = -(-where.num_devices // where.devices_per_node)
    link = where.machine.links.get("node")
    inside = (
        f"{link.bandwidth_bytes_per_second / 1e9:.0f} GB/s inside · "
        if link and where.devices_per_node > 1
        else ""
    )
    each = where.nic_bytes_per_second / where.devices_per_node / 1e9
    return f"{nodes:,} nodes x {where.devices_per_node} · {inside}network {each:.3g} GB/s a device"


def _row(at: int, item: Plan, usable: float, cost: Cost | None) -> str:
    own = item.predicted
    peak = own.memory.peak / _GIB
    filled = min(_BAR, round(_BAR * peak / usable))
    mark = ">" if at == 0 else " "
    star = "*" if item.obstacle else " "
    money = ""
    if cost is not None:
        money = f"  {cost.days:6.1f} " + (
            f"{'$' + format(cost.dollars / 1e3, ',.1f') + 'k':>9s}" if cost.dollars else ""
        )
    bar = "█" * filled + "░" * (_BAR - filled)
    return (
        f" {mark}{at + 1}{star}{describe(own.layout):52s} {own.step.total:7.3g} s "
        f"{own.tokens_per_second_per_device:9,.0f} {100 * own.mfu:5.1f}%  {bar} {peak:5.1f}{money}"
    )


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
    print(
        f"adding devices pays up to {pays}: beyond, each doubling gives less than half of what it costs"
        if pays
        else "nothing fits"
    )


def _scaling_row(
    point: ScalingPoint, points: tuple[ScalingPoint, ...], tokens: float | None, price: float | None
) -> str:
    if point.plan is None:
        return f"{point.num_devices:8,d} {'':>10s} {'':>8s} {'':>10s}  {point.obstacle}"
    base = next(item for item in points if item.plan is not None)
    cost = cost_of(point.plan, point.request, tokens, price) if tokens else None
    days = f"  {cost.days:.1f} days" if cost else ""
    return (
        f"{point.num_devices:8,d} {point.seconds:8.3g} s {base.seconds / point.seconds:7.2f}x "
        f"{100 * point.efficiency(base):9.0f}%  {describe(point.plan.layout)}{days}"
    )
