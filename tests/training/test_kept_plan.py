"""A run that goes on keeps its plan, as long as it still is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.checkpoint.folder import step_name
from meshwright.checkpoint.manifest import MANIFEST_NAME, Manifest, RunFacts
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.training.config import load_config
from meshwright.training.deciding import decided
from meshwright.training.kept_plan import kept_plan
from meshwright.training.planning import plan_of

PLAN = make_plan(
    PlanRequest(pp=2, micro_batch=2, stages=("blocks.3",), policy=1), world_size=4, global_batch=8
)
UNLIKE = make_plan(
    PlanRequest(stage_ranks=((0,), (1, 2)), micro_batch=2, stages=("blocks.3",)), world_size=3, global_batch=8
)


def write(folder: Path, step: int, plan) -> None:
    place = folder / "ckpt" / step_name(step)
    place.mkdir(parents=True)
    run = RunFacts(step, plan=json.loads(plan.to_json()))
    (place / MANIFEST_NAME).write_text(Manifest(run, plan.world_size, (), ()).to_json())


def kept(folder: Path, *overrides: str, world_size: int = 4):
    config = load_config(None, ["plan.mode=auto", "train.global_batch=8", *overrides]).config
    return config, kept_plan(config, folder, world_size=world_size)


@pytest.mark.parametrize("plan", [PLAN, UNLIKE], ids=["even", "unlike"])
def test_the_newest_checkpoints_plan_is_the_runs(tmp_path, plan):
    write(tmp_path, 2, UNLIKE if plan is PLAN else PLAN)
    write(tmp_path, 4, plan)
    config, found = kept(tmp_path, world_size=plan.world_size)
    assert found is not None
    assert plan_of(decided(config, found), world_size=plan.world_size) == plan
    assert set(found.reasons.values()) == {"kept from step-00000004"}


def test_what_is_fixed_now_must_agree(tmp_path):
    write(tmp_path, 2, PLAN)
    _, found = kept(tmp_path, "plan.pp=2", "plan.zero=1")
    assert found is not None
    assert not {"pp", "zero"} & set(found.keys)
    for overrides in (("plan.pp=1",), ("plan.zero=0",), ("train.global_batch=16",), ("plan.tp=2",)):
        assert kept(tmp_path, *overrides)[1] is None


def test_other_processes_and_no_checkpoint_plan_anew(tmp_path):
    assert kept(tmp_path)[1] is None
    write(tmp_path, 2, PLAN)
    assert kept(tmp_path, world_size=2)[1] is None
    manifest = tmp_path / "ckpt" / step_name(2) / MANIFEST_NAME
    manifest.write_text(manifest.read_text()[:-9])
    assert kept(tmp_path)[1] is None, "damaged: whoever loads it says so"
