"""A loop of your own over tensor-parallel ranks: the numbers of one process, through a save at another layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_processes import lines_starting

from meshwright.errors import MeshwrightError
from meshwright.launching import launch_script

SCRIPT = """
import sys

import torch
from torch.nn import functional as F

import meshwright
from meshwright.models import GPT, GPTConfig, language_model_loss

plan, steps = sys.argv[1], int(sys.argv[2])
sizes = dict(num_layers=2, dim=24, num_heads=6, ffn_dim=50, dropout=0.2)
tokens = torch.randint(101, (24, 8), generator=torch.Generator().manual_seed(3))
data = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


def build():
    return GPT(GPTConfig(vocab_size=101, max_seq_len=7, **sizes))


with meshwright.job(plan, precision="fp64", seed=4, watchdog=60, out="out") as job:
    model = job.build(build, loss=language_model_loss)
    optimizer = job.optimizer(model, torch.optim.Adafactor if steps == 0 else torch.optim.AdamW, lr=0.05)
    job.resume()
    for batch in job.batches(data, global_batch=12, micro_batch=2, steps=steps):
        if job.step % 2:
            loss = model.step(batch)
        else:  # each sample has as many labels: means of micro-batches
            with model.accumulate(len(batch)):
                for part in batch:
                    logits = model(part["tokens"])
                    F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten()).backward()
            loss = 0.0
        optimizer.step()
        if job.is_first:
            print(f"step {job.step} {loss:.10f} {model.result.grad_norm:.10f}")
    held_out = job.evaluate(model, data, samples=24)
    state = model.state_dict()
    job.save()
    if job.is_first:
        print(f"held out {held_out:.10f}")
        for name, value in state.items():
            print(f"state {name} {tuple(value.shape)} {value.double().square().sum():.8f}")
"""


def test_one_process_and_tensor_parallel_ranks_compute_the_same_and_go_on(own_script, capfd) -> None:
    launch_script(own_script, processes=1, arguments=["", "4"])
    alone = capfd.readouterr().out
    Path("out").rename("alone")
    launch_script(own_script, processes=3, arguments=["tp=3,zero=1,sequence_parallel=true", "2"])
    first = capfd.readouterr().out
    launch_script(own_script, processes=4, arguments=["tp=2,zero=3,recompute=full", "4"])
    second = capfd.readouterr().out
    assert lines_starting(first + second, "step ") == lines_starting(alone, "step ")
    assert len(lines_starting(alone, "step ")) == 4
    assert lines_starting(second, "held out ", "state ") == lines_starting(alone, "held out ", "state ")
    assert any("(101, 24)" in line for line in lines_starting(second, "state "))


def test_a_rule_that_needs_whole_matrices_is_refused(own_script) -> None:
    with pytest.raises(MeshwrightError) as caught:
        launch_script(own_script, processes=2, arguments=["tp=2", "0"])
    assert caught.value.code == "E228"
    assert "Adafactor looks at whole parameters, and plan.tp = 2 cuts them over ranks" in str(caught.value)
