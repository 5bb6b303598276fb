"""A user's script with a job: one process and several compute the same, and mistakes on one rank are named."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import meshwright
from meshwright.errors import MeshwrightError
from meshwright.launching import launch_script

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = """
import sys

import torch
from torch import nn

import meshwright

plan, mode = sys.argv[1], sys.argv[2]
x = torch.arange(48.0).view(24, 2) / 24
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def build():
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))


def loss_fn(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().sum(), len(inputs)


watchdog = 3 if mode == "skip" else 60
with meshwright.job(plan, precision="fp64", seed=4, watchdog=watchdog, out="out") as job:
    faulty = job.rank == 1
    model = job.build(build, loss=loss_fn)
    optimizer = job.optimizer(model, torch.optim.AdamW, lr=0.05)
    if mode == "nested":
        with meshwright.job():
            pass
    going_on = job.resume()
    if job.is_first:
        print("resumed", going_on, job.step)
    for batch in job.batches(data, global_batch=12, micro_batch=2, steps=int(mode) if mode.isdigit() else 4):
        if mode == "raise" and faulty and job.step == 2:
            raise ValueError("of the user")
        if mode == "no loss" and faulty and job.step == 2:
            with model.accumulate(len(batch)):
                pass
        loss = model.step(batch)
        if mode == "skip" and faulty and job.step == 2:
            optimizer.zero_grad()
            continue
        optimizer.step()
        job.log(loss=loss)
    held_out = job.evaluate(model, data, samples=24)
    job.save(word="said")
    if job.is_first:
        print(f"held out {held_out:.12f}")
        if job.world_size > 1:
            print("transport", job._groups.all.transport.name)
"""


@pytest.fixture
def script(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(SCRIPT)
    return Path("own.py")


def _here(path: Path, *arguments: str) -> None:
    """As `python path`, in this process."""
    argv, sys.argv = sys.argv, [str(path), *arguments]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = argv
        torch.set_num_threads(threads)


def test_one_process_and_two_compute_the_same_and_go_on(script, capfd) -> None:
    _here(script, "", "4")
    alone = capfd.readouterr().out
    records = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert {"loss", "grad_norm", "lr", "tokens"} <= records[-1].keys()
    assert records[-1]["tokens"] == 48
    Path("out").rename("alone")

    launch_script(script, processes=2, arguments=["zero=3", "2"])
    launch_script(script, processes=3, arguments=["zero=1,sync=ring,transport=gloo", "4"])
    together = capfd.readouterr().out
    assert "resumed None 0" in alone
    assert "resumed {'word': 'said'} 2" in together
    assert _lines(together, "transport ") == ["transport shared memory", "transport gloo, ring"]
    assert _lines(alone, "held out ")[0] == _lines(together, "held out ")[1]
    assert _lines(alone, "step=") == _lines(together, "step=")


def _lines(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


@pytest.mark.parametrize(
    ("mode", "code", "text"),
    [
        ("raise", "E401", "rank 1 raised ValueError: of the user"),
        ("no loss", "E702", "ended on rank 1 after 0 of 3 backward calls"),
        (
            "skip",
            "E404",
            "rank 0 issued all_gather of 64 float64 (gather bucket 0), rank 1 issued reduce_scatter",
        ),
        ("nested", "E705", "one job at a time, and it connects by itself"),
    ],
)
def test_a_mistake_on_one_rank_ends_all_and_is_named(script, mode: str, code: str, text: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        launch_script(script, processes=2, arguments=["zero=1", mode])
    assert caught.value.code == code
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "code", "text"),
    [
        ("processes=4", "E200", "plan.processes=4, but 1 processes started"),
        ("zero=7", "E109", "plan.zero = 7"),
        ("stage=2", "E101", "unknown key 'plan.stage'"),
        ("ep=2", "E110", "plan.ep"),
        ("stage_ranks=[[0],[1,2]]", "E237", "plan.stage_ranks = [[0], [1, 2]] in a loop of your own"),
        ("sync=parameter_server", "E223", "your loop runs the model on every rank"),
    ],
)
def test_a_plan_that_cannot_be(script, plan: str, code: str, text: str) -> None:
    with pytest.raises(MeshwrightError) as caught, meshwright.job(plan, out="out"):
        pass
    assert caught.value.code == code
    assert text in str(caught.value)


def _mean(model, batch) -> torch.Tensor:
    return model(batch[0]).square().mean()


def _mean_of_some(model, batch) -> torch.Tensor:
    return model(batch[0])[batch[0][:, 0] > 3].square().mean()


def test_a_bare_mean_is_tried_on_samples_of_the_dataset(script) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(24.0).view(12, 2))

    def train(loss) -> float:
        with meshwright.job(out="out") as job:
            model = job.build(lambda: torch.nn.Linear(2, 1), loss=loss)
            (batch,) = job.batches(data, global_batch=4, micro_batch=1, steps=1)
            assert len(batch) == 4  # one sample each, on which nothing could be tried
            return model.step(batch)

    assert train(_mean) > 0
    with pytest.raises(MeshwrightError, match="E112 loss_fn returned a bare scalar that is not a mean"):
        train(_mean_of_some)


def test_ctrl_c_leaves_the_job_and_another_may_begin(script) -> None:
    models = []

    def interrupted() -> None:
        with meshwright.job(out="out") as job:
            models.append(job.build(lambda: torch.nn.Linear(2, 2)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(MeshwrightError, match="E705 Linear is used after its job ended"), torch.no_grad():
        models[0](torch.ones(1, 2))
    with meshwright.job(out="out") as job, torch.no_grad():
        assert job.build(lambda: torch.nn.Linear(2, 2))(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.parametrize("name", ["ddp_tutorial", "own_loop"])
def test_examples_run_alone_and_on_two_ranks(name: str, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    path = EXAMPLES / f"{name}.py"
    _here(path)
    alone = capfd.readouterr().out
    launch_script(path, processes=2, arguments=["zero=3"])
    assert capfd.readouterr().out == alone
    assert len(_lines(alone, "step=")) >= 3


def test_the_tutorial_runs_on_stages(tmp_path, monkeypatch, capfd) -> None:
    """Its model-parallel part, a layer on each of two ranks, two times; the same lines as alone."""
    monkeypatch.chdir(tmp_path)
    path = EXAMPLES / "ddp_tutorial.py"
    _here(path)
    alone = capfd.readouterr().out
    launch_script(path, processes=4, arguments=["pp=2,schedule=serial"])
    steps = _lines(capfd.readouterr().out, "step=")
    assert steps == _lines(alone, "step=")[:3]
    assert len(steps) == 3
