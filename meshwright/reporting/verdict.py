"""The sentence above a report, and the figures by which runs are compared. Knows nothing of pages."""

from __future__ import annotations

from meshwright.reporting.reading import RunData, is_number

# Column of the comparison: name, key of the result, how it is written.
_COMPARED = (
    ("steps", "steps", "{:,}"),
    ("last loss", "final_loss", "{:.4f}"),
    ("held-out loss", "eval_loss", "{:.4f}"),
    ("tokens a second", "tokens_per_second", "{:,.0f}"),
    ("seconds a step, median", "step_seconds_median", "{:.4g}"),
    ("MFU", "mfu", "{:.1%}"),
    ("HFU", "hfu", "{:.1%}"),
    ("processes", "world_size", "{:,}"),
)


def verdict(data: RunData) -> str:
    """What happened, in one sentence: how far, how the loss went, how fast, memory against its prediction, verify."""
    return (
        "; ".join(part for part in (_course(data), _speed(data), _memory(data), _verified(data)) if part)
        + "."
    )


def _course(data: RunData) -> str:
    plan = "" if data.plan is None else f" with {data.plan.describe()}"
    losses = data.series("loss")
    if not data.steps:
        return f"no step is recorded{plan}"
    last = data.steps[-1]["step"]
    text = f"{last:,} step{'s' if last != 1 else ''}{plan}"
    if data.result is None:
        text += " without a result, so the run goes on or it died"
    elif data.result.get("interrupted"):
        text += ", stopped when asked to"
    if losses:
        text += f": loss {losses[0][1]:.4f} → {losses[-1][1]:.4f}"
    held = data.series("eval_loss")
    return f"{text}, held-out {held[-1][1]:.4f}" if held else text


def _speed(data: RunData) -> str:
    result = data.result or {}
    if not result.get("step_seconds_median"):
        return ""
    text = f"{result['tokens_per_second']:,.0f} tokens/s, {result['step_seconds_median']:.3g} s a step"
    said = result.get("prediction")
    if said:
        change = result["step_seconds_median"] / said["step_seconds"] - 1
        text += f" ({abs(change):.0%} {'above' if change > 0 else 'below'} the plan's)"
    mfu = result.get("mfu")
    return f"{text}, {mfu:.1%} MFU" if is_number(mfu) else f"{text}, MFU unknown"


def _memory(data: RunData) -> str:
    ledger = (data.result or {}).get("memory_bytes")
    if not ledger:
        return ""
    both = [
        (ledger["predicted"][name], ledger["measured"].get(name))
        for name in ledger["predicted"]
        if ledger["predicted"][name] is not None and ledger["measured"].get(name) is not None
    ]
    before, after = (sum(values) for values in zip(*both, strict=True)) if both else (0, 0)
    if not before:
        return ""
    change = after / before - 1
    if abs(change) < 0.0005:
        return f"memory as predicted ({after / 2**20:,.1f} MiB a rank)"
    return f"memory {after / 2**20:,.1f} MiB a rank, {abs(change):.1%} {'above' if change > 0 else 'below'} prediction"


def _verified(data: RunData) -> str:
    if data.verified is None:
        return "not verified"
    if data.verified["ok"]:
        compared = sum(1 for check in data.verified["checks"] if check["compared"])
        return f"verified equal to one device in {compared} checks"
    wrong = next(check for check in data.verified["checks"] if not check["ok"])
    return f"NOT equal to one device, first in {wrong['name']}"


def comparison(runs: list[RunData]) -> list[tuple[str, ...]]:
    """Rows of figures that at least one run has: name, then one text a run."""
    rows: list[tuple[str, ...]] = []
    for name, key, form in _COMPARED:
        values = [(data.result or {}).get(key) for data in runs]
        if any(is_number(value) for value in values):
            rows.append((name, *(form.format(value) if is_number(value) else "–" for value in values)))
    return rows
