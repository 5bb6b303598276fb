"""The figure of what a plan said of step time and memory, beside what was measured."""

from __future__ import annotations

from meshwright.reporting.figure import NO_RESULT, Figure, Missing
from meshwright.reporting.reading import RunData
from meshwright.reporting.svg import Bar, bars, count_bars


def prediction(data: RunData) -> Figure | Missing:
    """Step time and peak memory, as the plan said and as they were; the plan's time by its parts."""
    anchor, title = "prediction", "Step time and peak, predicted over measured"
    result = data.result
    if result is None:
        return Missing(anchor, title, NO_RESULT)
    said, seconds = result.get("prediction"), result.get("step_seconds_median")
    if not said or not seconds:
        return Missing(
            anchor, title, "nothing was predicted: the plan is of neither plan.lock nor plan.mode = auto."
        )
    peak = max(result["peak_memory_bytes"])
    rows: list[tuple[object, ...]] = [
        ("step, seconds", said["step_seconds"], seconds),
        ("peak of the fullest rank, bytes", said["memory_bytes"]["peak"], peak),
    ]
    parts = {name: value for name, value in said["step_parts"].items() if value > 0 and name != "recompute"}
    rows += [(f"of it {name}, seconds", value, None) for name, value in parts.items()]
    groups = {
        "step": [
            Bar("predicted", said["step_seconds"], f"predicted {said['step_seconds']:.4g} s"),
            Bar("measured", seconds, f"measured {seconds:.4g} s"),
        ],
        **{name: [Bar("predicted", value, f"predicted {value:.4g} s")] for name, value in parts.items()},
    }
    return Figure(
        anchor,
        title,
        f"What the plan said of a step, with its parts below, and the median that was measured; the peak was "
        f"{peak / said['memory_bytes']['peak'] - 1:+.0%} of what was predicted, after {said['runs_before']} runs that "
        "taught.",
        bars(groups, label=title),
        ("what", "predicted", "measured"),
        tuple(rows),
        num_marks=count_bars(groups),
    )
