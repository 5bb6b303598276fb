"""Peak memory of a comparison against the same trainings without one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import meshwright
from meshwright.comm.log import CommLog
from meshwright.comm.mesh import Mesh, World, connect, disconnect
from meshwright.launching.local import run_local
from meshwright.launching.verify import job_of
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.training.step import train_step
from meshwright.verification.build import build_rank
from meshwright.verification.job import Functions, VerifyJob
from meshwright.verification.plain import Stream, plain_optimizer
from meshwright.verification.subject import batch_of, make_subject, materialise, peak_memory
from tests.parity.subjects import Tokens
from tests.verification.models import Rows

OPTIONS = {"steps": 1, "global_batch": 4, "resume": False}


def plain_reference(call: bytes, _world: World, _context: Any) -> tuple[int, int]:
    """A model, an optimizer and a loop; peak memory before and after."""
    job, before = cloudpickle.loads(call), peak_memory()
    task = make_subject(job)
    model = materialise(task).train()
    stream = Stream(job, len(task.train_data))
    optimizer = plain_optimizer(dict(model.named_parameters()), job.config.train.optimizer)
    for step in range(job.steps):
        optimizer.zero_grad(set_to_none=True)
        for microbatch in range(job.plan.num_microbatches):
            batch = batch_of(task.train_data, stream.ids(step, microbatch), precision=job.plan.precision)
            total, count = task.loss(model, batch)
            (total / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
    return before, peak_memory()


def plain_candidate(call: bytes, world: World, _context: Any) -> tuple[int, int]:
    """The product's steps as one rank."""
    job, before = cloudpickle.loads(call), peak_memory()
    device = torch.device("cpu")
    connect(world, device=device, timeout_seconds=60)
    mesh = Mesh(job.plan.mesh, world, log=CommLog(world.rank, world.size), device=device)
    rank = build_rank(job, make_subject(job), mesh.data_groups(), clip_norm=1.0)
    rank.engine.model.train()
    for step in range(job.steps):
        train_step(
            rank.state,
            lambda microbatch, step=step: batch_of_rank(rank, job, step, microbatch),
            loss=rank.loss,
            num_microbatches=rank.num_microbatches,
            lr=job.config.train.optimizer.lr,
            clip_norm=1.0,
        )
    disconnect()
    return before, peak_memory()


def batch_of_rank(rank: Any, job: VerifyJob, step: int, microbatch: int) -> Any:
    ids = rank.batches.sample_ids(step, microbatch).tolist()
    return batch_of(rank.batches.dataset, ids, precision=job.plan.precision)


def measure(functions: Functions, plan: str, folder: Path) -> dict[str, float]:
    """Bytes above an empty process: of verify's reference and candidate, and of both without verification."""
    call = cloudpickle.dumps(job_of(functions, plan=plan, processes=2, options=OPTIONS))
    ((before, peak),) = run_local(partial(plain_reference, call), processes=1, run_dir=folder / "reference")
    ranks = run_local(partial(plain_candidate, call), processes=2, run_dir=folder / "candidate")
    result = meshwright.verify(
        functions.build, functions.loss, functions.data, plan=plan, processes=2, **OPTIONS
    )
    assert result.ok, result.table()
    return {
        "plain reference": peak - before,
        "plain candidate": sum(peak - before for before, peak in ranks),
        "reference": result.peak_memory_bytes["reference"] - before,
        "candidate": result.peak_memory_bytes["candidate"] - 2 * before,
    }


def sum_of_squares(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return model(batch["x"]).square().sum(), len(batch["x"])


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 700), *(nn.Linear(700, 700) for _ in range(4)))


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_each_run_takes_little_more_than_without_comparison(tmp_path):
    """Stricter than twice the sum of both, which run one after the other: a second model would be seen."""
    bytes_of = measure(Functions(wide, sum_of_squares, Rows()), "zero=0", tmp_path)
    assert bytes_of["plain reference"] > 4 * 8 * 4 * 700**2 * 0.9  # weights, gradients and two moments
    for name in ("reference", "candidate"):
        assert bytes_of[name] < 1.5 * bytes_of[f"plain {name}"], bytes_of


@pytest.mark.parity
@pytest.mark.parametrize("zero", [0, 3])
def test_a_model_of_20_million_parameters(zero, tmp_path, capsys):
    sizes = {"dim": 512, "num_layers": 6, "num_heads": 8, "ffn_dim": 2048, "vocab_size": 2048}
    functions = Functions(
        lambda: GPT(GPTConfig(max_seq_len=32, **sizes)), language_model_loss, Tokens(40, 2048, 32)
    )
    assert 19e6 < sum(p.numel() for p in functions.build().parameters()) < 21e6
    bytes_of = measure(functions, f"zero={zero}", tmp_path)
    with capsys.disabled():
        print("\n" + "  ".join(f"{name} {value / 2**20:,.0f} MiB" for name, value in bytes_of.items()))
    peak = max(bytes_of["reference"], bytes_of["candidate"])
    assert peak < 2 * (bytes_of["plain reference"] + bytes_of["plain candidate"])
    for name in ("reference", "candidate"):
        assert bytes_of[name] < 1.5 * bytes_of[f"plain {name}"], bytes_of
