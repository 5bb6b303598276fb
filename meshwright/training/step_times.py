"""When each rank of a pipeline computed what in the newest step, kept for whoever looks at the run later.

Owns the files: one for each place of the pipeline, of the rank with the first part of everything else. Seconds are
those of the host's one clock, so times of several hosts, which have several, are not kept. Knows nothing of how they
are shown.
Simplification: CPU processes only; on a GPU computations are issued ahead, and the host's clock says nothing of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from meshwright.comm.mesh import World
from meshwright.layout.plan import TrainPlan
from meshwright.pipeline.executor import PipelineExecutor
from meshwright.schedule.action import Action

TIMELINE = "timeline"


class StepTimes:
    """A clock of an executor."""

    def __init__(self, executor: PipelineExecutor, place: int) -> None:
        """Listen to every computation of this place of the pipeline from now on."""
        self._place = place
        self._first: str | None = None
        self._rows: list[tuple[str, float, float]] = []
        executor.clock = self._take

    def _take(self, action: Action, start: float, end: float, _cpu: float) -> None:
        name = str(action)
        if self._first is None:
            self._first = name
        if name == self._first:
            self._rows.clear()
        self._rows.append((name, start, end))

    def write(self, run_dir: Path) -> None:
        """Write the newest step of this rank; nothing where there was none."""
        if self._rows:
            folder = run_dir / TIMELINE
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"place-{self._place:04d}.json"
            path.write_text(json.dumps(self._rows) + "\n", encoding="utf-8")


def step_times(
    executor: PipelineExecutor | None, plan: TrainPlan, world: World, device: torch.device
) -> StepTimes | None:
    """The clock of this rank, None where its times are not kept."""
    if executor is None or plan.stage_ranks or device.type != "cpu" or world.local_size < world.size:
        return None
    at = plan.mesh.coordinates(world.rank)
    is_first = not any(index for name, index in at.items() if name != "pp")
    return StepTimes(executor, at["pp"]) if is_first else None
