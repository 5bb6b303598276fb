"""Parameter servers without lockstep: the bound, learning, stopping, checkpoints, and what is refused."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import meshwright
from meshwright.checkpoint.folder import ResumeFrom
from meshwright.comm.mesh import World
from meshwright.comm.ops import DataGroups
from meshwright.errors import MeshwrightError, PlanError, WorkerError
from meshwright.layout.policy import find_policy
from meshwright.sharding.engine import ShardingEngine
from meshwright.testing.ranks import local_mesh
from meshwright.training import loop, push_pull
from meshwright.training.config import load_config
from meshwright.training.console import Console
from meshwright.training.loop import Run
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.planning import plan_of
from tests.parity.harness import with_servers
from tests.verification.models import Noisy, Rows, loss_of_labels

DIGITS = {
    "model": {"source": "preset:mlp-digits"},
    "data": {"train": "digits"},
    "train": {
        "global_batch": "64 samples",
        "stop_at": "4 epochs",
        "seed": 1,
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0},
        "schedule": {"name": "constant", "warmup": "0 steps"},
        "clip_norm": 0,
        "eval_samples": 256,
    },
    "plan": {"sync": "parameter_server"},
}


def train(mesh, run_dir, overrides=(), slow=(), resume=None, asked=None) -> dict:
    """Train as one rank; `slow`: ranks that sleep before each step; `asked`: the step after which rank 1 is asked to
    stop."""
    config = load_config(None, [f"save.dir={run_dir}", *overrides], built_in=DIGITS).config
    stream = io.StringIO()
    world = World(rank=mesh.rank, size=mesh.world.size)
    given, peak = loop.train_step, loop.device_peak

    def step(state, micro_batch, **arguments):
        if mesh.rank in slow:
            time.sleep(0.01)
        return given(state, micro_batch, **arguments)

    loop.train_step, loop.device_peak = step, lambda *_: None
    answer: dict = {}
    try:
        console = Console(stream if mesh.rank == 0 else None)
        run = Run(
            config, world, run_dir=Path(run_dir), console=console, device=torch.device("cpu"), log=mesh.log
        )
        answer["result"] = run.train(resume, lambda: mesh.rank == 1 and run.state.step == asked)
        answer["lead"] = run.asynchronous.largest_lead if run.asynchronous else None
        answer["step"] = run.state.step
        parameters = run.state.engine.model.parameters()
        answer["weights"] = torch.cat([p.detach().flatten() for p in parameters])
    except MeshwrightError as error:
        answer["error"] = str(error)
    finally:
        loop.train_step, loop.device_peak = given, peak
    return {**answer, "text": stream.getvalue()}


def test_a_slow_worker_is_never_left_further_behind_than_the_bound_and_digits_are_learned(ranks, tmp_path):
    lockstep = ranks.run(train, 4, tmp_path / "lockstep", ["plan.servers=2"])
    together = ranks.run(train, 4, tmp_path / "bound", ["plan.servers=2", "plan.staleness=2"], (1,))
    assert [rank["lead"] for rank in together] == [2] * 4  # the bound is reached, and never passed
    assert "async  staleness 2: the furthest worker was 2 steps ahead of the slowest" in together[0]["text"]
    assert (
        "2 workers, 2 parameter servers · micro 32 x accumulate 1 · fp32 · staleness 2" in together[0]["text"]
    )
    first, second = (rank["weights"] for rank in together[:2])
    assert torch.equal(first, second)
    results = [run[0]["result"] for run in (lockstep, together)]
    assert results[0]["steps"] == results[1]["steps"] == 107
    assert results[0]["tokens"] == results[1]["tokens"]
    assert results[0]["first_loss"] == pytest.approx(results[1]["first_loss"], rel=1e-5)
    assert results[0]["eval_loss"] < 0.1
    assert results[1]["eval_loss"] < 0.2


def test_with_bound_0_no_worker_is_ahead(ranks, tmp_path):
    answers = ranks.run(train, 3, tmp_path / "run", ["plan.staleness=0", "train.stop_at=20 steps"], (0,))
    assert [rank["lead"] for rank in answers] == [0, 0, 0]


def test_asked_to_stop_all_end_with_one_step_and_another_layout_goes_on(ranks, tmp_path):
    overrides = ["save.every=end", "train.stop_at=40 steps"]
    first = ranks.run(
        train, 3, tmp_path, [*overrides, "plan.staleness=3", "train.optimizer.name=adamw"], (0,), None, 7
    )
    (step,) = {rank["step"] for rank in first}
    assert 9 <= step <= 7 + 1 + 3 + 2
    assert first[0]["result"]["interrupted"]
    assert first[0]["result"]["checkpoint"].endswith(f"step-{step:08d}")
    assert torch.equal(first[0]["weights"], first[1]["weights"])
    resume = ResumeFrom(tmp_path, required=True)
    on = ["train.optimizer.name=adamw", *overrides]
    second = ranks.run(train, 2, tmp_path, [*on, "plan.sync=native", "plan.zero=1"], (), resume)
    assert second[0]["result"]["steps"] == 40
    assert f"step {step}, saved on 3 ranks (2 workers, 1 parameter server" in second[0]["text"]
    longer = [*on, "plan.staleness=1", "train.stop_at=45 steps"]
    third = ranks.run(train, 3, tmp_path, longer, (), resume)
    assert [rank["step"] for rank in third] == [45] * 3
    assert third[0]["result"]["final_loss"] < first[0]["result"]["first_loss"]


def test_a_server_ends_the_run_of_a_worker_that_did_not_wait():
    alone = local_mesh().group("dp")
    engine = ShardingEngine(
        torch.nn.Linear(3, 2),
        policy=find_policy("ddp"),
        groups=DataGroups.of(alone),
        device=torch.device("cpu"),
    )
    groups = replace(DataGroups.of(replace(alone, ranks=(0, 1, 2), index=2)), computing=alone, num_servers=1)
    optimizer = ShardedOptimizer(OptimizerSpec("sgd", weight_decay=0.0), engine.shards)
    server = push_pull.Server(engine, optimizer, groups, staleness=1, first_step=4, total_steps=9)
    before, gradient = engine.model.weight.clone(), torch.ones(8)
    for worker, step in ((0, 4), (1, 4), (0, 5), (0, 6)):
        push = push_pull._Push(
            step, 0.1, is_last=False, wants_stop=False, used=(False, True)
        )  # the bias comes first
        server._take(worker, push, gradient)
    assert server._ready() == [1]  # worker 0 has finished 7 steps, worker 1 has finished 5
    assert server.largest_lead == 1
    torch.testing.assert_close(engine.model.weight, before - 4 * 0.1)
    with pytest.raises(
        WorkerError, match=r"E406 worker 0 is in step 7 .*finished 5 steps: 2 ahead, and plan"
    ):
        server._take(0, replace(push, step=7), gradient)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["train.stop_at=60 s"], "train.stop_at = 60 s with plan.staleness = 1.*Stop at steps"),
        (["train.eval_every=5 steps"], 'train.eval_every = 5 steps with.*Set it to "end"'),
        (["save.every=5 steps"], 'save.every = 5 steps with.*Set it to "end"'),
        (["plan.precision=fp16"], "plan.precision = fp16 with.*Take bf16"),
        (["plan.offload=optimizer"], "plan.offload with"),
    ],
)
def test_what_needs_lockstep_is_refused_by_name(overrides, text):
    config = load_config(None, ["plan.staleness=1", *overrides], built_in=DIGITS).config
    with pytest.raises(PlanError, match=f"E223 {text}"):
        plan_of(config, world_size=3)


def _normalises(mesh) -> str:
    config = load_config(None, ["plan.staleness=1"], built_in=DIGITS).config
    groups = with_servers(mesh, 1).data_groups()
    task = type("Task", (), {"model": Noisy(normalises=True)})()
    with pytest.raises(PlanError) as caught:
        loop.alone_state(task, plan_of(config, world_size=3), groups, spec=None, dropout="native")
    return str(caught.value)


def test_batch_statistics_are_refused_by_name(ranks):
    text = ranks.run(_normalises, 3)[0]
    assert "E223 plan.staleness = 1 with batch normalisation" in text


def test_verify_refuses_another_result_each_time():
    with pytest.raises(PlanError, match=r"E223 plan\.staleness = 1: .*no reference"):
        meshwright.verify(
            Noisy, loss_of_labels, Rows(), plan="sync=parameter_server,staleness=1", processes=3
        )
