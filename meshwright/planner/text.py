"""Plans as people read them: the table, what stands around it, and what must be warned of.

Owns these texts for the command line and for Python. Must not know where plans are written.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from meshwright.planner.cost import Cost, cost_of
from meshwright.planner.plans import Plan, Plans, describe, rank_order
from meshwright.presets.counts import num_parameters, short_count
from meshwright.presets.known_errors import step_error
from meshwright.simulation.job import Cluster, num_microbatches
from meshwright.simulation.prediction import percent_text

_BAR = 9
_GIB = 2**30


@dataclass(frozen=True)
class Spending:
    """Attributes: tokens of the whole run, None for neither days nor cost; dollars of a device and hour, if known."""

    tokens: float | None = None
    price: float | None = None


NO_SPENDING = Spending()


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
    other = found.other_batch
    if other is not None:
        texts.append(
            f"W273 a batch of {found.request.work.global_batch} does not divide by {found.request.cluster.num_devices} "
            f"devices: with {other.global_batch} a sequence takes {100 * other.gain:.0f} % less time"
        )
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


# benchmarks/RESULTS.md.
_MEASURED_HERE = (
    "of 25 plans measured on 2 cores half are within 6 % of the measured time, the worst 18 % below it"
)


def _error_text(where: Cluster) -> str:
    """How well such times are known."""
    if where.host is not None:
        return _MEASURED_HERE
    known = step_error(where.machine.name)
    if known is None:
        return f"unknown on {where.machine.name}: too few runs are published (docs/simulation.md has what is known)"
    return (
        f"of published runs on {where.machine.name} half are within {100 * known.median:.0f} % of the predicted time, "
        f"9 of 10 within {100 * known.high:.0f} %"
    )


def table_lines(found: Plans, seconds: float, spending: Spending = NO_SPENDING) -> list[str]:
    """The table of plans with the question above it, and what sets the plans apart below.

    Args:
        found: the plans.
        seconds: that finding them took.
        spending: for columns of days and cost.
    """
    request, tokens, price = found.request, spending.tokens, spending.price
    work, where = request.work, request.cluster
    usable = request.usable_bytes / _GIB
    wide = max(len(describe(item.layout)) for item in found.plans)
    lines = [
        f"model    {work.model.name}    {short_count(num_parameters(work.model))} params · {work.model.num_layers} "
        f"layers · {work.model.num_heads} heads ({work.model.num_kv_heads} kv) · vocab {work.model.vocab_size:,}",
        f"cluster  {where.num_devices:,} x {where.machine.name}    {_cluster_text(where)}",
        f"batch    {work.global_batch:,} x {work.seq_len:,} = {short_count(work.global_batch * work.seq_len)} tokens "
        f"a step · {found.best.layout.precision} compute, fp32 state",
        *_host_lines(where),
        _searched_text(found, seconds),
        f"    {'plan':{wide}s} {'step':>10s} {'tok/s/dev':>9s} {'MFU':>6s}  peak of {usable:.1f} GiB"
        + (f"  {'days':>7s}" if tokens else "")
        + (f" {'cost':>9s}" if price is not None else ""),
    ]
    for at, item in enumerate(found.plans):
        cost = cost_of(item.predicted, request, tokens, price) if tokens else None
        lines.append(_row(at, item, usable, cost, wide))
    lines += [f"{at + 1:3d}   {item.why}" for at, item in enumerate(found.plans)]
    best = found.best
    # Of a small model in MiB, or all would be 0.0.
    scale, unit, digits = (_GIB, "GiB", 1) if best.predicted.memory.peak >= _GIB else (2**20, "MiB", 0)
    memory = {key: value / scale for key, value in asdict(best.predicted.memory).items() if value}
    lines += [
        "memory   " + " · ".join(f"{key} {value:.{digits}f}" for key, value in memory.items()) + f" {unit}",
        f"ranks    inside out: {rank_order(best.layout)} · batch {work.global_batch} = dp {best.layout.dp} x micro "
        f"{best.layout.micro_batch} x {num_microbatches(work, best.layout)}",
        "front    "
        + " · ".join(f"{item.seconds:.3g} s {item.bytes / scale:.0f} {unit}" for item in found.front[:6]),
        f"error    {_error_text(where)}",
    ]
    if any(item.obstacle for item in found.plans):
        lines.append("*        train does not run it today (--json: obstacle)")
    return lines


def _searched_text(found: Plans, seconds: float) -> str:
    """What became of all layouts: the counts add up."""
    refused = sum(found.rejected.values())
    reasons = sorted(found.rejected.items(), key=lambda pair: -pair[1])
    shown = ", ".join(f"{count:,} {reason}" for reason, count in reasons[:3])
    rest = ", ..." if len(reasons) > 3 else ""
    parts = [
        f"{found.priced:,} priced",
        f"{refused:,} refused ({shown}{rest})" if refused else "",
        f"{count:,} left out by bounds" if (count := found.searched - found.priced - refused) else "",
    ]
    return f"searched {found.searched:,} in {seconds:.1f} s: {' · '.join(filter(None, parts))}"


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
        if link and min(where.num_devices, where.devices_per_node) > 1
        else ""
    )
    each = where.nic_bytes_per_second / where.devices_per_node / 1e9
    if nodes == 1:
        return inside.removesuffix(" · ") or "one device"
    last = where.num_devices % where.devices_per_node
    rest = f", the last with {last}" if last else ""
    return f"{nodes:,} nodes x {where.devices_per_node}{rest} · {inside}network {each:.3g} GB/s a device"


def _row(at: int, item: Plan, usable: float, cost: Cost | None, wide: int) -> str:
    own = item.predicted
    peak = own.memory.peak / _GIB
    filled = min(_BAR, round(_BAR * peak / usable))
    mark = ">" if at == 0 else " "
    star = "*" if item.obstacle else " "
    money = ""
    if cost is not None:
        money = f"  {cost.days:7.1f}" + (f" {dollars_text(cost):>9s}" if cost.dollars is not None else "")
    bar = "█" * filled + "░" * (_BAR - filled)
    held = f"{peak:5.1f}" if peak >= 1 else f"{peak:5.2f}"
    return (
        f"{mark + str(at + 1):>3s}{star}{describe(own.layout):{wide}s} {own.step.total:8.3g} s "
        f"{own.tokens_per_second_per_device:9,.0f} {percent_text(own.mfu):>6s}  {bar} {held}{money}"
    )


def dollars_text(cost: Cost) -> str:
    """For people; empty where no price is known."""
    if cost.dollars is None:
        return ""
    return (
        f"${cost.dollars:,.0f}" if cost.dollars < 10_000 else f"${short_count(cost.dollars)}".replace(" ", "")
    )
