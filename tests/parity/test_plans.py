"""Plans that are found, kept in a file and trained by, on real processes of this host; a resumed run plans again."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.parity

RUN = """\
[model]
source = "preset:gpt-nano"
num_layers = 2
[data]
train = "stdlib"
seq_len = 32
[train]
global_batch = 8
stop_at = "8 steps"
eval_every = "never"
schedule = {name = "constant"}
[plan]
processes = 2
[save]
every = "end"
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "meshwright", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)

    return run


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_plan_is_trained_by_refused_when_stale_and_made_again_on_resume(call, tmp_path):
    planned = call("plan", "run.toml")
    assert planned.returncode == 0, planned.stderr
    assert "host     " in planned.stdout  # measured here, and not of nominal figures
    whole = call("train", "run.toml", "plan.lock=plan.lock.json", "save.dir=whole", "--json")
    assert whole.returncode == 0, whole.stderr
    said = json.loads(whole.stdout)["prediction"]
    stored = json.loads((tmp_path / "whole" / "result.json").read_text())["prediction"]
    lock = json.loads((tmp_path / "plan.lock.json").read_text())
    assert said == stored
    assert said["step_seconds"] == lock["plans"][0]["step_seconds"]
    # The run has taught, and the file is not stale for that.
    again = call("train", "run.toml", "plan.lock=plan.lock.json", "save.dir=again")
    assert again.returncode == 0, again.stderr
    assert "learned  " in call("plan", "run.toml", "--out", "other.json").stdout
    stale = call("train", "run.toml", "plan.lock=plan.lock.json", "train.global_batch=16")
    assert stale.returncode == 2
    assert "E293" in stale.stderr
    assert "another batch or sequence length" in stale.stderr
    # Half of the run on 2 processes, the rest on 4 by another plan: the same losses.
    half = call("train", "run.toml", "plan.mode=auto", "save.dir=part", "train.stop_at=4 steps")
    assert half.returncode == 0, half.stderr
    rest = call(
        "train", "run.toml", "plan.mode=auto", "save.dir=part", "plan.processes=4", "--resume", "auto"
    )
    assert rest.returncode == 0, rest.stderr
    plan = tomllib.loads((tmp_path / "part" / "resolved.toml").read_text())["plan"]
    assert plan["processes"] == 4
    assert losses_of(tmp_path / "part") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-5)
