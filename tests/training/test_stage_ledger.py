"""The memory ledger of pipelines: predicted is measured on every place, and what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.errors import DoesNotFitError
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.layout.recompute import parse_recompute
from meshwright.schedule.catalogue import make_schedule
from meshwright.schedule.lower import Extras, lower
from meshwright.training.activations import Subject
from meshwright.training.assemble import shard_model
from meshwright.training.ledger import Ledger, measured_state
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.run_ledger import RunLedger
from meshwright.training.stage_ledger import StageBytes, peak_of, predict_places
from meshwright.training.stages import Pipeline, pipeline_of
from meshwright.training.state import TrainState
from meshwright.training.step import train_step
from tests.training.test_ledger import BATCH, make_gpt, make_subject


def make_stages(world: Any, dp: int, **keys: Any) -> tuple[Subject, Mesh, Pipeline]:
    """A GPT in two stages, 4 micro-batches a step."""
    keys["recompute"] = parse_recompute(keys.get("recompute", "none"))
    request = PlanRequest(pp=2, micro_batch=BATCH, transport="gloo", **keys)
    plan = make_plan(request, world_size=2 * dp, global_batch=4 * BATCH * dp)
    subject = replace(make_subject(), model=make_gpt(dropout=0.0), plan=plan)
    mesh = Mesh.of_plan(plan, world.world, log=world.log, device=torch.device("cpu"))
    made = pipeline_of(
        subject.model, subject.loss, subject.batch, plan, mesh.data_groups(), device=torch.device("cpu")
    )
    return subject, mesh, made


def _held(world: Any, dp: int, keys: dict[str, Any]) -> tuple[Ledger, dict[str, int]]:
    subject, mesh, made = make_stages(world, dp, **keys)
    groups, spec, device = mesh.data_groups(), OptimizerSpec(), torch.device("cpu")
    assert groups.pipeline is not None
    ledger = predict_places(subject, spec, made)[groups.pipeline.place]
    own = RunLedger(subject, spec, schedules={}, usable=None, pipeline=made)
    engine = shard_model(
        subject.model, subject.plan, groups, device=device, initialiser=None, dropout="native", pipeline=made
    )
    state = TrainState(engine, ShardedOptimizer(spec, engine.shards))
    state.stages = made.executor(engine)
    for _ in range(2):
        with own.step(state):
            train_step(
                state,
                lambda _m: {name: x.clone() for name, x in subject.batch.items()},
                loss=subject.loss,
                num_microbatches=4,
                lr=1e-3,
                clip_norm=None,
            )
    measured = dict(own.ledger.measured)
    assert measured.items() >= measured_state(engine, state.optimizer, offload=False).items()
    return ledger, measured


PLANS = [
    (1, {"schedule": "1f1b"}),
    (2, {"policy": 3, "schedule": "gpipe", "recompute": "full"}),
    (1, {"schedule": "gpipe", "precision": "bf16"}),
    (1, {"schedule": "interleaved", "recompute": "full"}),
    (2, {"policy": 1, "schedule": "1f1b", "recompute": "selective"}),
    (2, {"policy": 2, "schedule": "interleaved"}),
]


@pytest.mark.parametrize(
    ("dp", "keys"), [PLANS[0], *(pytest.param(*plan, marks=pytest.mark.parity) for plan in PLANS[1:])]
)
def test_predicted_is_measured_on_every_place(ranks, dp, keys) -> None:
    # What ranks own differs by a step count of a parameter: the first of each place is predicted.
    for ledger, measured in ranks.run(_held, 2 * dp, dp, keys)[::dp]:
        for name in ("weights", "gradients", "optimizer", "gathered"):
            assert measured[name] == ledger.predicted[name], name
        activations = measured["activations"] + measured["logits"]
        assert activations == pytest.approx(ledger.predicted["activations"], rel=0.05), ledger.peak_at


def _refusal(world: Any) -> str:
    subject, _, made = make_stages(world, 1, schedule="gpipe")
    peaks = [ledger.predicted_peak for ledger in predict_places(subject, OptimizerSpec(), made)]
    assert len(set(peaks)) == 2, "places differ, and the larger one counts"
    RunLedger(subject, OptimizerSpec(), schedules={}, usable=max(peaks), pipeline=made)
    with pytest.raises(DoesNotFitError) as caught:
        RunLedger(subject, OptimizerSpec(), schedules={}, usable=max(peaks) - 1, pipeline=made)
    return f"{caught.value.code} {caught.value.message}"


def test_what_does_not_fit_on_one_of_the_places_is_refused(ranks) -> None:
    for text in ranks.run(_refusal, 2):
        assert text.startswith("E301 does not fit: ")
        assert 'plan.recompute="full"' in text.split("Changes that fit")[1]


def test_the_peak_follows_the_program() -> None:
    """Two forwards wait in 1F1B on the first of two places, all four in GPipe; batches stay for the step."""
    stage = StageBytes(kept=100, forward=110, backward=130, received=0, gradients=10)
    names = {"1f1b": 2, "gpipe": 4}
    for schedule, waiting in names.items():
        program = lower(make_schedule(schedule, 2, 4), Extras(reduces=False)).programs[0]
        peak, where = peak_of(program, [stage, stage], batch_bytes=1)
        read = 3 if schedule == "1f1b" else 4
        assert (peak - read) // 100 == waiting
        assert where.startswith("backward of stage 0")
