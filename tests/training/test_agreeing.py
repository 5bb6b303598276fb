"""Ranks that somebody else started measure together, and all decide the same."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.training import auto
from meshwright.training.agreeing import agree_on_plan
from meshwright.training.config import RunConfig, load_config
from meshwright.training.task import make_task
from tests.pipeline.models import Uneven
from tests.verification.models import Rows, loss_of_labels


def user_task():
    """What `model.source = "py:..."` names."""
    return Uneven(), loss_of_labels, Rows()


def decide_here(mesh, config: RunConfig, may_measure: bool) -> tuple[object, list[str]]:
    lines: list[str] = []
    measure = auto.measure_rates
    if not may_measure:
        auto.measure_rates = None  # type: ignore[assignment]
    try:
        found = agree_on_plan(
            config, mesh.world, device=torch.device("cpu"), resume=None, make=make_task, say=lines.append
        )
    finally:
        auto.measure_rates = measure
    return found.plan, lines


def test_all_ranks_take_the_same_plan_and_the_next_run_measures_nothing(ranks, tmp_path: Path):
    given = ["model.source=py:tests.training.test_agreeing:user_task", "train.global_batch=8"]
    given += ["plan.mode=auto", "plan.pp=2", f"data.cache_dir={tmp_path}"]
    config = load_config(None, given).config
    first, second = ranks.run(decide_here, 2, config, True)
    assert first == second
    plan, lines = first
    assert (plan.mode, plan.pp, plan.dp, len(plan.stages)) == ("given", 2, 1, 1)
    assert lines[0].startswith("auto   Uneven: 5 units → pp 2 x dp 1")
    again = ranks.run(decide_here, 2, config, False)
    assert [x[0] for x in again] == [plan, plan]
