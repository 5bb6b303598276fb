"""Job scripts run against stand-ins of the clusters' programs: interrupted, restarted, resumed; and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch_processes import processes_where, wait_until

import meshwright
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.launching.ports import choose_port
from tests.launching.fake_clusters import make_programs

ROOT = Path(__file__).resolve().parents[2]
RUN = """\
[model]
source = "preset:mlp-digits"
[data]
train = "digits"
[train]
global_batch = 32
stop_at = "120 steps"
eval_every = "never"
[plan]
dp = 2
[save]
dir = "run"
every = "10 steps"
[log]
print_every = "60 steps"
"""


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "digits.toml"
    path.write_text(RUN)
    return path.name


@pytest.fixture
def running():
    """Jobs that a test started; nothing of them is left after it."""
    jobs: list[subprocess.Popen[str]] = []
    yield jobs
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()


TRAINS = f'#!/bin/sh\nexec "{sys.executable}" -m meshwright "$@"\n'


def start(
    script: str, folder: Path, *programs: str, command: str = TRAINS, kill: bool = False
) -> subprocess.Popen[str]:
    """Run a job script; `command` is the program called meshwright, `kill` ends a task once there is a checkpoint."""
    path = make_programs(folder / "bin", *programs)
    (folder / "job.sh").write_text(script)
    (path / "meshwright").write_text(command)
    (path / "meshwright").chmod(0o755)
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_"))},
        "SLURM_JOB_ID": "77",
        "FAKE_DIR": str(folder),
        "FAKE_TASKS": "2",
        "FAKE_KILL": str(int(kill)),
        "FAKE_PORT": str(choose_port(None)),
        "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return subprocess.Popen(
        ["bash", "job.sh"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def steps_of(folder: Path) -> list[int]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parity
def test_a_slurm_job_goes_on_after_a_killed_task(run_file, tmp_path, running):
    job = meshwright.launch.slurm(run_file, nodes=1, processes_per_node=2, time="01:00:00")
    done = start(job.script, tmp_path, "srun", "scontrol", kill=True)
    running.append(done)
    output, _ = done.communicate(timeout=400)
    assert done.returncode == 0, output
    assert (tmp_path / "calls").read_text().splitlines() == ["srun", "srun"]
    assert "attempt 0 of digits ended with code" in output
    resumed = re.search(r"^resume run/ckpt/step-0*(\d+): step \1, saved on 2 ranks", output, re.MULTILINE)
    assert resumed is not None, output
    assert 10 <= int(resumed[1]) < 120
    assert steps_of(tmp_path) == list(range(1, 121))


def test_a_slurm_job_ends_its_step_and_queues_again_before_the_limit(run_file, tmp_path, running):
    job = meshwright.launch.slurm(run_file, processes_per_node=2)
    waits = f'#!/bin/sh\ntouch "{tmp_path}/task$SLURM_PROCID"\nexec sleep 600\n'
    started = start(job.script, tmp_path, "srun", "scontrol", command=waits)
    running.append(started)
    wait_until(lambda: len(list(tmp_path.glob("task*"))) == 2, 60, "two tasks")
    started.send_signal(signal.SIGTERM)
    output, _ = started.communicate(timeout=60)
    assert started.returncode == 0, output
    assert (tmp_path / "calls").read_text().splitlines() == ["srun", "scontrol requeue 77"]
    mine = f"FAKE_DIR={tmp_path}"
    wait_until(
        lambda: not processes_where(lambda p: mine in (p / "environ").read_text()), 20, "tasks have ended"
    )


@pytest.mark.parity
def test_an_ssh_job_runs_on_every_host(run_file, tmp_path, running):
    job = meshwright.launch.ssh(
        run_file,
        hosts=["localhost", "localhost"],
        processes_per_node=1,
        port=choose_port(None),
        python=sys.executable,
        interface="lo",
    )
    done = start(job.script, tmp_path, "ssh")
    running.append(done)
    output, _ = done.communicate(timeout=400)
    assert done.returncode == 0, output
    assert (tmp_path / "calls").read_text().splitlines() == ["ssh localhost"] * 2
    assert steps_of(tmp_path) == list(range(1, 121))


def test_scripts_are_shell(run_file, tmp_path):
    scripts = (
        meshwright.launch.slurm(run_file, processes_per_node=2).script,
        meshwright.launch.ssh(run_file, hosts=["a b", "c"], processes_per_node=1).script,
    )
    for script in scripts:
        path = tmp_path / "script.sh"
        path.write_text(script)
        subprocess.run(["bash", "-n", str(path)], check=True)
        assert script.startswith("#!/usr/bin/env bash\n")
        assert "--resume auto" in script


def test_submit(run_file, tmp_path, monkeypatch):
    job = meshwright.launch.slurm(run_file, processes_per_node=2)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(ConfigError, match="E123 sbatch is not on this host's PATH"):
        job.submit()
    monkeypatch.setenv("PATH", f"{make_programs(tmp_path / 'bin', 'sbatch')}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DIR", str(tmp_path))
    assert job.submit() == "Submitted batch job 4711"
    assert (tmp_path / "submitted.sh").read_text() == job.script


@pytest.mark.parametrize(
    ("overrides", "options", "text"),
    [
        ((), {"nodes": 0}, "E123 0 nodes"),
        (("save.every=never",), {"processes_per_node": 2}, "E1"),
        ((), {"nodes": 2, "processes_per_node": 2}, "E200 .*dp 2 = 2, but 4 processes"),
        (("plan.ep=2",), {"processes_per_node": 2}, "E110"),
    ],
)
def test_what_cannot_run_makes_no_script(run_file, overrides, options, text):
    with pytest.raises(MeshwrightError, match=text):
        meshwright.launch.slurm(run_file, *overrides, **options)


def test_without_checkpoints_there_is_no_script(run_file, tmp_path):
    (tmp_path / "digits.toml").write_text(RUN.replace('every = "10 steps"', ""))
    with pytest.raises(ConfigError, match=r"E123 save\.every is not set"):
        meshwright.launch.slurm(run_file, processes_per_node=2)
