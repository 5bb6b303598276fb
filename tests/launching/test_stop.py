"""A scheduler's SIGTERM: the worker finishes its step, saves and leaves; started again, it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TINY = """
import torch
from torch import nn


def make():
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    return nn.Linear(4, 1), lambda model, batch: (model(batch[0]).square().sum(), len(batch[0])), data
"""


def start(folder: Path, stop_at: str) -> subprocess.Popen[str]:
    overrides = [f"train.stop_at={stop_at}", "save.every=end", "save.dir=run", "train.schedule.name=constant"]
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright", "train", "run.toml", *overrides, "--resume", "auto", "--json"],
        cwd=folder,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_worker_that_is_asked_to_stop_saves_and_goes_on_later(tmp_path):
    (tmp_path / "tiny.py").write_text(TINY)
    (tmp_path / "run.toml").write_text('[model]\nsource = "py:tiny:make"\n')
    metrics = tmp_path / "run" / "metrics.jsonl"
    with start(tmp_path, "1000000 steps") as process:
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        first = json.loads(process.stdout.read())
    assert process.returncode == 130
    assert first["interrupted"] is True
    steps = first["steps"]
    assert first["checkpoint"] == f"run/ckpt/step-{steps:08d}"
    with start(tmp_path, f"{steps + 2} steps") as process:
        second = json.loads(process.stdout.read())
    assert process.returncode == 0
    assert (second["steps"], second["resumed_from"]) == (steps + 2, first["checkpoint"])
    assert len(metrics.read_text().splitlines()) == steps + 2
