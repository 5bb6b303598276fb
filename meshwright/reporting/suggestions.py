"""What to change next: the changes of a run's plan that the cost model says gain most, as a figure with its table.

Owns how a finished run becomes the planner's question. Gains are ratios of two prices, held against the run's own
median step, so that what is priced wrongly of both cancels.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.planner.asking import ask
from meshwright.planner.changes import Change, best_changes, layout_of_plan
from meshwright.planner.request import Request
from meshwright.presets.machines import MACHINES, Machine
from meshwright.reporting.figure import NO_RESULT, Figure, Missing
from meshwright.reporting.reading import RunData
from meshwright.reporting.svg import Bar, bars, count_bars
from meshwright.simulation.job import Cluster
from meshwright.simulation.prediction import predict
from meshwright.simulation.reading import make_cluster

_ANCHOR, _TITLE = "suggestions", "What to change next"
_GIB = 2**30
_OTHER_DEVICES = (
    "its devices are none that the cost model knows from published runs. Of processes of a host that "
    "`meshwright doctor --measure` has measured, `meshwright plan run.toml` says which plan is faster."
)
_READ = ("model", "data", "train")


def suggestions(data: RunData) -> Figure | Missing:
    """At most three changes with their predicted gains."""
    result, plan = data.result, data.plan
    if result is None or plan is None or not result.get("step_seconds_median"):
        return Missing(_ANCHOR, _TITLE, NO_RESULT)
    machine, layout = _machine(result), layout_of_plan(plan)
    if machine is None:
        return Missing(_ANCHOR, _TITLE, _OTHER_DEVICES)
    if layout is None:
        return Missing(_ANCHOR, _TITLE, f"no price is known of {plan.describe()}.")
    request = _request(data, make_cluster(machine, layout.num_devices))
    if isinstance(request, str):
        return Missing(_ANCHOR, _TITLE, request)
    seconds = float(result["step_seconds_median"])
    priced = predict(request.work, layout, request.cluster)
    found = best_changes(request, layout)
    ratio = f"the cost model says {priced.step.total:.4g} s of this run's step, which took {seconds:.4g} s"
    if not found:
        return Missing(_ANCHOR, _TITLE, f"no change is predicted to save 1 % of a step ({ratio}).")
    rows = tuple(_row(change, seconds, priced.memory.peak) for change in found)
    groups = {
        text: [Bar("predicted", gain, f"{gain:.1%} · {saved:.3g} s a step")] for text, gain, saved, _ in rows
    }
    return Figure(
        _ANCHOR,
        _TITLE,
        f"Each bar is the part of the median step that one change is predicted to save, alone; {ratio}, and gains are "
        "taken from it in proportion. Measure before you believe.",
        bars(groups, label=_TITLE),
        ("change", "predicted part of a step", "seconds", "GiB of memory more"),
        rows,
        num_marks=count_bars(groups),
    )


def _row(change: Change, seconds: float, peak: float) -> tuple[str, float, float, float]:
    text = ", ".join(f"plan.{key}={value}" for key, value in change.keys.items())
    more = (change.predicted.memory.peak - peak) / _GIB
    return text, round(change.gain, 4), round(change.gain * seconds, 6), round(more, 2)


def _machine(result: Mapping[str, Any]) -> Machine | None:
    """The run's devices, where the cost model knows them."""
    name = str(result.get("mfu_peak") or "").split(" ")[0]
    return next((item for item in MACHINES if item.name == name and name != "cpu"), None)


def _request(data: RunData, cluster: Cluster) -> Request | str:
    """The planner's question, or why there is none."""
    sections: dict[str, dict[str, object]] = {}
    for setting in data.settings:
        section, _, key = setting.key.partition(".")
        if section in _READ and "." not in key:
            sections.setdefault(section, {})[key] = tomllib.loads(f"value = {setting.value}")["value"]
    try:
        return ask(sections, {}, cluster=cluster)
    except MeshwrightError as error:
        return f"the planner cannot ask about this run: {error.message}"
