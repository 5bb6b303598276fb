"""A loop of your own over the stages of a pipeline: the numbers of one process, saved and gone on in other layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launch_processes import lines_starting

from meshwright.comm.log import CommLog
from meshwright.comm.ops import DataGroups, Group, PipelineGroups
from meshwright.errors import MeshwrightError
from meshwright.launching import launch_script
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.pipeline.part import Part
from meshwright.training.own_stages import plan_own_stages

SCRIPT = """
import sys

import torch

import meshwright
from meshwright.models import GPT, GPTConfig, language_model_loss

plan, steps = sys.argv[1], int(sys.argv[2])
sizes = dict(num_layers=2, dim=24, num_heads=6, ffn_dim=50, dropout=0.2)
tokens = torch.randint(101, (24, 8), generator=torch.Generator().manual_seed(3))
data = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


def build():
    return GPT(GPTConfig(vocab_size=101, max_seq_len=7, **sizes))


with meshwright.job(plan, precision="fp64", seed=4, watchdog=60, out="out") as job:
    model = job.build(build, loss=language_model_loss, data=data)
    blocks = job.optimizer(model, torch.optim.AdamW, only="blocks.*", lr=0.05)
    decay = [("*norm*", {"weight_decay": 0.0})]
    others = job.optimizer(model, torch.optim.AdamW, only=lambda n: "blocks" not in n, groups=decay, lr=0.05)
    job.resume()
    for batch in job.batches(data, global_batch=12, micro_batch=2, steps=steps):
        loss = model.step(batch)
        norm = model.clip_grad_norm(0.5)
        blocks.step()
        others.step()
        if job.is_first:
            print(f"step {job.step} {loss:.10f} {norm:.10f}")
    held_out = job.evaluate(model, data, samples=24)
    state = model.state_dict()
    job.barrier()
    job.save()
    if job.is_first:
        print(f"held out {held_out:.10f}")
        for name, value in state.items():
            print(f"state {name} {tuple(value.shape)} {value.double().square().sum():.8f}")
"""


def same_through(own_script: Path, capfd, *plans: tuple[int, str, str]) -> None:
    """One process, and the (processes, plan, last step) one after the other."""
    launch_script(own_script, processes=1, arguments=["", plans[-1][2]])
    alone = capfd.readouterr().out
    Path("out").rename("alone")
    texts = []
    for processes, plan, steps in plans:
        launch_script(own_script, processes=processes, arguments=[plan, steps])
        texts.append(capfd.readouterr().out)
    assert [line for text in texts for line in lines_starting(text, "step ")] == lines_starting(
        alone, "step "
    )
    assert lines_starting(texts[-1], "held out ", "state ") == lines_starting(alone, "held out ", "state ")
    assert len(lines_starting(alone, "state ")) > 10


@pytest.mark.parity
def test_one_process_and_stages_compute_the_same(own_script, capfd) -> None:
    same_through(own_script, capfd, (2, "pp=2,schedule=zb-h1", "2"))


@pytest.mark.parity
def test_layouts_of_a_pipeline_go_on_from_each_other(own_script, capfd) -> None:
    plans = [(4, "pp=2,zero=1", "1"), (3, "pp=3,schedule=gpipe", "2"), (4, "pp=2,tp=2,recompute=full", "3")]
    same_through(own_script, capfd, *plans, (2, "zero=3", "4"), (4, "pp=2,zero=3,schedule=interleaved", "5"))


@pytest.mark.parity
def test_sequences_are_cut_in_stages(own_script, capfd) -> None:
    same_through(own_script, capfd, (4, "pp=2,cp=2,zero=1", "2"))


LINES = """
import sys

import torch

import meshwright
from meshwright.errors import MeshwrightError

data = torch.utils.data.TensorDataset(torch.arange(24.0).view(12, 2))


def build():
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))


def loss(model, batch):
    return model(batch[0]).square().sum(), len(batch[0])


with meshwright.job(sys.argv[1], watchdog=30, out="out") as job:
    model = job.build(build, loss=loss, data=data)
    try:
        model(torch.ones(1, 2))
    except MeshwrightError as error:
        print(error)
    with model.accumulate():
        pass
"""


def test_lines_that_run_the_whole_model_are_refused(own_script, capfd) -> None:
    Path("lines.py").write_text(LINES)
    with pytest.raises(MeshwrightError) as caught:
        launch_script(Path("lines.py"), processes=2, arguments=["pp=2"])
    assert str(caught.value).startswith("E237 model.accumulate() with plan.pp = 2: each rank has some layers")
    forward = "E237 a forward of your own with plan.pp = 2: each rank has some layers of Sequential"
    assert len(lines_starting(capfd.readouterr().out, forward)) == 1


def _loss(model, batch) -> torch.Tensor:
    return model(batch[0]).square().mean()


class _Mesh:
    device = torch.device("cpu")

    def data_groups(self) -> DataGroups:
        group = Group("dp", (0,), 0, None, CommLog(0, 1))
        return replace(DataGroups.of(group), pipeline=PipelineGroups(group, group, group))


@pytest.mark.parametrize(
    ("loss", "data", "text"),
    [
        (None, [(torch.ones(2),)], "E237 plan.pp = 2 in a loop of your own, .* built without loss"),
        (_loss, None, r"E237 .* built without data: .*job\.build\(build, loss=loss, data=dataset\)"),
        (
            _loss,
            [(torch.ones(2),)],
            r"E111 with plan.pp loss_fn.* must return \(sum, count\); it returned no pair",
        ),
    ],
)
def test_what_a_model_in_stages_must_be_built_with(loss, data, text: str) -> None:
    plan = make_plan(PlanRequest(pp=2), world_size=2, global_batch=2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    with pytest.raises(MeshwrightError, match=text):
        plan_own_stages(model, loss, data, plan, _Mesh(), cut_batch=Part)  # type: ignore[arg-type]
