"""What a report shows: each figure made of the data of one run, or the reason why it is not there.

A figure carries its table, so that what is drawn can be held against what is meant. Knows nothing of pages.
Simplifications: a curve of more than 400 steps is drawn by means of as many groups of steps; communication is that of
rank 0.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.reporting.figure import NO_RESULT, Figure, Missing
from meshwright.reporting.predicted import prediction
from meshwright.reporting.reading import RunData, is_number
from meshwright.reporting.suggestions import suggestions
from meshwright.reporting.svg import Bar, bars, count_bars, curve
from meshwright.reporting.timeline import schedule

MOST_POINTS = 400
MOST_RANKS = 16
_MIB = 1 << 20


def figures_of(data: RunData) -> list[Figure | Missing]:
    """All figures of a report, in its order."""
    makers: tuple[Callable[[RunData], Figure | Missing], ...] = (
        suggestions,
        memory,
        peaks,
        prediction,
        breakdown,
        schedule,
        communication,
        loss,
        gradient_norm,
        learning_rate,
        utilisation,
        throughput,
        verification,
        configuration,
        environment,
    )
    return [make(data) for make in makers]


def memory(data: RunData) -> Figure | Missing:
    """Bytes of rank 0 by category, predicted over measured."""
    anchor, title = "memory", "Memory of a rank, predicted over measured"
    ledger = (data.result or {}).get("memory_bytes")
    if data.result is None:
        return Missing(anchor, title, NO_RESULT)
    if not isinstance(ledger, Mapping):
        return Missing(anchor, title, "no ledger is kept under tp and pp.")
    predicted, measured = ledger["predicted"], ledger["measured"]
    names = [name for name in predicted if predicted.get(name) or measured.get(name)]
    rows = [(name, predicted.get(name), measured.get(name)) for name in names]
    groups = {
        name: [
            Bar(kind, float(value), f"{kind} {_bytes(value)}")
            for kind, value in (("predicted", before), ("measured", after))
            if value is not None
        ]
        for name, before, after in rows
    }
    return Figure(
        anchor,
        title,
        "The light bar was predicted before the run, the dark one measured in its second step; equal lengths mean "
        "that the prediction was right.",
        bars(groups, label=title),
        ("category", "predicted bytes", "measured bytes"),
        tuple(rows),
        num_marks=count_bars(groups),
    )


def peaks(data: RunData) -> Figure | Missing:
    """The largest memory of each rank; of many ranks the extremes."""
    anchor, title = "peaks", "Peak memory of each rank"
    values = (data.result or {}).get("peak_memory_bytes")
    if not values:
        return Missing(anchor, title, NO_RESULT)
    rows: list[tuple[str, int]] = [(f"rank {rank}", value) for rank, value in enumerate(values)]
    if len(rows) > MOST_RANKS:
        by_size = sorted(rows, key=lambda row: row[1])
        middle = round(statistics.median(values))
        rows = [
            ("least: " + by_size[0][0], by_size[0][1]),
            (f"median of {len(rows)} ranks", middle),
            ("most: " + by_size[-1][0], by_size[-1][1]),
        ]
    groups = {name: [Bar("measured", float(value), _bytes(value))] for name, value in rows}
    return Figure(
        anchor,
        title,
        "What each process (on a GPU: its allocator) held at most; one bar much longer than the others is a rank that "
        "runs out of memory first.",
        bars(groups, label=title),
        ("rank", "bytes"),
        tuple(rows),
        num_marks=count_bars(groups),
    )


def breakdown(data: RunData) -> Figure | Missing:
    """The median step by what its time was good for."""
    anchor, title = "breakdown", "Where the time of a step goes"
    result = data.result
    if result is None:
        return Missing(anchor, title, NO_RESULT)
    seconds, mfu, hfu = (result.get(name) for name in ("step_seconds_median", "mfu", "hfu"))
    if not seconds or not is_number(mfu):
        return Missing(
            anchor, title, "the device's peak is unknown, so no share of the time is known as useful."
        )
    assert mfu is not None, "a number"
    executed = hfu if is_number(hfu) and hfu is not None else mfu
    rows = (
        ("model FLOPs at peak", mfu * seconds),
        ("computed again, at peak", (executed - mfu) * seconds),
        ("all else", (1 - executed) * seconds),
    )
    groups = {
        name: [Bar("measured", value, f"{value:.4g} s · {value / seconds:.1%}")] for name, value in rows
    }
    return Figure(
        anchor,
        title,
        f"The median step of {seconds:.4g} s: what the model's FLOPs (and those of recomputation) would take at the "
        "device's peak; all else is kernels below peak, communication, waiting and the host, which this run did not "
        "record apart.",
        bars(groups, label=title),
        ("part", "seconds"),
        rows,
        num_marks=count_bars(groups),
    )


def communication(data: RunData) -> Figure | Missing:
    """Bytes that rank 0 asked for, by group and operation."""
    anchor, title = "communication", "Communication by group and operation"
    entries: Sequence[Mapping[str, Any]] | None = (data.result or {}).get("communication")
    if entries is None:
        return Missing(anchor, title, NO_RESULT)
    if not entries:
        return Missing(anchor, title, "this run asked nothing of the network.")
    rows = tuple((e["group"], e["operation"], e["calls"], e["bytes"]) for e in entries)
    groups = {
        f"{group} · {operation}": [
            Bar("measured", float(size), f"{_bytes(size)} in {calls:,} call{'s' if calls != 1 else ''}")
        ]
        for group, operation, calls, size in rows
    }
    return Figure(
        anchor,
        title,
        "Bytes of all calls of rank 0 from the start of the run to its end, evaluation included; the longest bar is "
        "where a faster link or another layout would help most.",
        bars(groups, label=title),
        ("group", "operation", "calls", "bytes"),
        rows,
        num_marks=count_bars(groups),
    )


def loss(data: RunData) -> Figure | Missing:
    """Training loss, with held-out losses as points."""
    reading = (
        "The line is the loss of each step and should fall; circles are held-out losses, and one far above the line "
        "means that the model has learnt the training data by heart."
    )
    return _curve(data, "loss", ("loss", "Loss", reading), points="eval_loss")


def gradient_norm(data: RunData) -> Figure | Missing:
    """Norm of the gradient before clipping."""
    reading = "The norm before clipping; a sudden peak comes before a loss that jumps."
    return _curve(data, "grad_norm", ("gradient-norm", "Gradient norm", reading))


def learning_rate(data: RunData) -> Figure | Missing:
    """Learning rate of each step."""
    reading = "What the optimizer used; compare its bends with those of the loss."
    return _curve(data, "lr", ("learning-rate", "Learning rate", reading))


def utilisation(data: RunData) -> Figure | Missing:
    """MFU of each step."""
    peak = (data.result or {}).get("mfu_peak") or "the device's peak"
    reading = (
        f"Model FLOPs of a step, attention counted in full, over what {peak} could have done in its time."
    )
    return _curve(data, "mfu", ("mfu", "Model FLOPs utilisation (MFU)", reading))


def throughput(data: RunData) -> Figure | Missing:
    """Tokens a second of each step."""
    reading = (
        "Elements that the loss counted a second, over all ranks; dips are steps that something held up."
    )
    return _curve(data, "tokens_per_second", ("throughput", "Tokens a second", reading))


def _curve(data: RunData, key: str, texts: tuple[str, str, str], *, points: str = "") -> Figure | Missing:
    anchor, title, reading = texts
    series = data.series(key)
    if not series:
        why = (
            f"no line of metrics.jsonl has a number {key!r}." if data.steps else "metrics.jsonl has no steps."
        )
        return Missing(anchor, title, why)
    single = data.series(points) if points else []
    line = _grouped(series)
    rows: list[tuple[object, ...]] = [(step, key, value) for step, value in line]
    rows += [(step, points, value) for step, value in single]
    grouped = (
        f" {len(series):,} steps are drawn as means of {len(line)} groups." if len(line) < len(series) else ""
    )
    drawing = curve(line, points=single, label=f"{title} over steps")
    return Figure(
        anchor,
        title,
        reading + grouped,
        drawing,
        ("step", "number", "value"),
        tuple(rows),
        num_marks=len(rows),
    )


def _grouped(series: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """The series, or where it is long the means of steps and values of neighbours."""
    if len(series) <= MOST_POINTS:
        return list(series)
    cuts = [len(series) * part // MOST_POINTS for part in range(MOST_POINTS + 1)]
    groups = [series[a:b] for a, b in itertools.pairwise(cuts)]
    return [
        (statistics.fmean(step for step, _ in group), statistics.fmean(value for _, value in group))
        for group in groups
    ]


def verification(data: RunData) -> Figure | Missing:
    """What `meshwright verify` found for this run's plan."""
    anchor, title = "verify", "Parallel against one device"
    found = data.verified
    if found is None:
        command = f"meshwright verify {data.path / 'plan.lock.json'}"
        return Missing(
            anchor, title, f"this plan was not verified. `{command}` does it and keeps the result here."
        )
    checks = found["checks"]
    rows = tuple(
        (
            check["name"],
            _judged(check),
            check["compared"],
            check["worst_relative"],
            check["first_wrong"] or "",
        )
        for check in checks
    )
    groups = {
        check["name"]: [
            Bar(
                "measured" if check["ok"] else "wrong",
                float(check["compared"]),
                _found(check),
            )
        ]
        for check in checks
    }
    return Figure(
        anchor,
        title,
        f"{found['candidate']} against {found['reference']} ({found['model']}): a bar a check, as long as the number "
        "of things compared; orange ones found a difference.",
        bars(groups, label=title),
        ("check", "result", "compared", "worst relative difference", "first wrong"),
        rows,
        num_marks=count_bars(groups),
    )


def _judged(check: Mapping[str, Any]) -> str:
    if not check["ok"]:
        return f"{check['wrong']} wrong"
    return "equal" if check["compared"] else "nothing to compare"


def _found(check: Mapping[str, Any]) -> str:
    if check["ok"] and not check["compared"]:
        return _judged(check)
    mark = "✓" if check["ok"] else "✗"
    return f"{mark} {check['compared']:,} compared, worst {check['worst_relative']:.1e}"


def configuration(data: RunData) -> Figure | Missing:
    """Every key with the origin of its value."""
    anchor, title = "configuration", "Configuration"
    if not data.settings:
        return Missing(
            anchor, title, "the folder has no resolved.toml (a run under torchrun or SLURM writes none)."
        )
    return Figure(
        anchor,
        title,
        "Every key of the run, its value, and where the value came from.",
        "",
        ("key", "value", "origin"),
        tuple((setting.key, setting.value, setting.origin) for setting in data.settings),
    )


def environment(data: RunData) -> Figure | Missing:
    """Versions and machine."""
    anchor, title = "environment", "Environment"
    found = (data.result or {}).get("environment")
    if not found:
        return Missing(anchor, title, NO_RESULT)
    return Figure(anchor, title, "What rank 0 ran on.", "", ("what", "value"), tuple(found.items()))


def _bytes(value: float) -> str:
    if value < 1024:
        return f"{value:,.0f} bytes"
    return f"{value / _MIB:,.2f} MiB" if value >= _MIB / 10 else f"{value / 1024:,.1f} KiB"
