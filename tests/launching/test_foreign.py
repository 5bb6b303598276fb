"""The same worker under torchrun, with an elastic restart, and under SLURM's variables."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.comm.mesh import world_of

TARGETS = Path(__file__).with_name("launch_targets.py")
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost"}


def _clean_environment() -> dict[str, str]:
    kept = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in kept and not k.startswith("SLURM_")}


def test_torchrun_restarts_after_a_death(tmp_path, assert_session_empty) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [
        "--max-restarts",
        "2",
        "--monitor-interval",
        "0.1",
        str(TARGETS),
        str(tmp_path),
        "kill",
    ]
    environment = {**_clean_environment(), "OMP_NUM_THREADS": "1"}
    agent = subprocess.Popen(
        command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    _, errors = agent.communicate(timeout=90)
    assert agent.returncode == 0, errors
    for rank in range(2):
        assert (tmp_path / f"done{rank}").read_text() == "38 of attempt 1"
    assert_session_empty(agent.pid)


def _job_with_free_port() -> int:
    """A job number; the workers derive their port from it, so it must be one that nobody here uses."""
    for job in range(4000, 4100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", world_of({**SLURM, "SLURM_JOB_ID": str(job)}).port)):
                return job
    raise AssertionError("a hundred ports in a row are taken")


def _start_slurm_ranks(run_dir: Path, fault: str) -> list[subprocess.Popen[str]]:
    job = _job_with_free_port()
    workers = []
    for rank in range(2):
        slurm = {**SLURM, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_JOB_ID": str(job)}
        environment = {**_clean_environment(), **slurm, "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, str(TARGETS), str(run_dir), fault]
        workers.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    return workers


def test_slurm_variables_are_enough(tmp_path) -> None:
    for rank, worker in enumerate(_start_slurm_ranks(tmp_path, "none")):
        _, errors = worker.communicate(timeout=60)
        assert worker.returncode == 0, errors
        assert (tmp_path / f"done{rank}").read_text() == "38 of attempt 0"


@pytest.mark.parity
def test_watchdog_needs_no_launcher_of_ours(tmp_path) -> None:
    waiting, hanging = _start_slurm_ranks(tmp_path, "hang")
    try:
        _, errors = waiting.communicate(timeout=60)
        assert waiting.returncode == 5, errors
        expected = (
            "Rank 0 waits in all_reduce #5 (dp, reduce bucket 5); rank 1 never entered it: it is in data"
        )
        assert expected in errors
        assert json.loads((tmp_path / "errors" / "rank0.json").read_text())["culprits"] == [1]
        assert "in commit" in (tmp_path / "logs" / "rank1.stack").read_text()
        assert hanging.poll() is None  # asked for its stack, not ended
    finally:
        hanging.kill()
        hanging.communicate()
