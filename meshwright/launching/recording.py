"""What a run took against what was predicted for it: into its `result.json`, and as experience for the next plan.

Owns both; `planner/experience.py` has the rule of learning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.launching.planned import Planned
from meshwright.launching.this_host import host_file
from meshwright.planner.experience import (
    FEWEST_STEPS,
    experience_file,
    keep_experience,
    read_experience,
    updated,
)

# As `training/result_file.py` has it, which needs torch.
_RESULT = "result.json"
_FAR_OFF = 1 / 3


def recorded(result: Mapping[str, Any], plan: Planned, *, cache: Path) -> dict[str, Any]:
    """The result with its prediction, which is written into the run folder as well; the host learns from it.

    Args:
        result: of rank 0.
        plan: with what was predicted, or nothing.
        cache: where what is known of this host is kept.
    """
    entry, seconds = plan.predicted, result.get("step_seconds_median")
    if entry is None or not seconds:
        return dict(result)
    predicted, peak = _seconds(entry), _peak(entry)
    measured = max(result["peak_memory_bytes"])
    comparison = {
        "step_seconds": predicted,
        "step_error": predicted / seconds - 1,
        "step_parts": entry["step_parts"],
        "memory_bytes": entry["memory_bytes"],
        "memory_error": peak / measured - 1,
        "runs_before": plan.runs,
    }
    whole = {**result, "prediction": comparison}
    path = Path(str(result["run_dir"])) / _RESULT
    if path.is_file():
        stored = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**stored, "prediction": comparison}, indent=1) + "\n", encoding="utf-8")
    steady = result["steps"] >= FEWEST_STEPS and not result.get("interrupted")
    if steady and plan.on_host:
        parts = entry["step_parts"]
        assert isinstance(parts, Mapping), "parts of a step by name"
        place = experience_file(host_file(cache))
        keep_experience(
            place, updated(read_experience(place), parts, seconds, memory=(peak, float(measured)))
        )
    return whole


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """Predicted beside measured, in words; none where nothing was predicted."""
    said = result.get("prediction")
    if said is None:
        return []
    seconds, measured = result["step_seconds_median"], max(result["peak_memory_bytes"])
    lines = [
        f"plan   step {seconds:.3g} s, predicted {said['step_seconds']:.3g} ({said['step_error']:+.0%})   peak "
        f"{measured / 2**20:,.0f} MiB a rank, predicted {said['memory_bytes']['peak'] / 2**20:,.0f} "
        f"({said['memory_error']:+.0%})"
    ]
    if abs(seconds / said["step_seconds"] - 1) > _FAR_OFF:
        lines.append(
            f"W286 the step took {seconds / said['step_seconds']:.2f} x what the plan said. The next plan here has "
            "learned from it; on a quiet machine `meshwright doctor --measure` measures anew"
        )
    return lines


def _seconds(entry: Mapping[str, object]) -> float:
    value = entry["step_seconds"]
    assert isinstance(value, float), "seconds of a step"
    return value


def _peak(entry: Mapping[str, object]) -> float:
    memory = entry["memory_bytes"]
    assert isinstance(memory, Mapping), "bytes by name"
    return float(memory["peak"])
