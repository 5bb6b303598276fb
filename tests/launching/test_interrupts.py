"""Ctrl-C, SIGTERM and SIGKILL of the launcher at any moment: nothing is left."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch_processes import wait_until

PARENT = Path(__file__).with_name("launch_parent.py")


def _start(run_dir: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(PARENT), str(run_dir), "2"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)


def _end(parent: subprocess.Popen[bytes]) -> bytes:
    """What the launcher wrote until its end; one that goes on fails the test and is killed."""
    try:
        return parent.communicate(timeout=20)[1]
    finally:
        parent.kill()


def _interrupt_after(seconds: float, run_dir: Path, check) -> None:
    parent = _start(run_dir)
    try:
        parent.wait(seconds)
    except subprocess.TimeoutExpired:
        # As a terminal does: every process of the foreground group gets it.
        os.killpg(parent.pid, signal.SIGINT)
    errors = _end(parent)
    check(parent.pid)
    if parent.returncode == 130:
        assert errors == b""
    else:
        # While the launcher itself is still imported, the interpreter's own way to end: one interrupt is reported (not
        # one traceback: imports interrupt themselves with caught KeyErrors, which are printed as what came before).
        assert parent.returncode == -signal.SIGINT
        assert errors.count(b"KeyboardInterrupt") <= 1


# Imports of the launcher, the server's import of torch (twice), the start of workers or work.
@pytest.mark.parametrize(
    "seconds",
    [0.15, pytest.param(0.6, marks=pytest.mark.parity), 1.2, pytest.param(2.4, marks=pytest.mark.parity)],
)
def test_ctrl_c_leaves_nothing(seconds: float, tmp_path, assert_session_empty) -> None:
    _interrupt_after(seconds, tmp_path, assert_session_empty)


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(20))
def test_ctrl_c_at_random_moments(seed: int, tmp_path, assert_session_empty) -> None:
    _interrupt_after(random.Random(seed).uniform(0.02, 2.5), tmp_path, assert_session_empty)


def _is_working(run_dir: Path) -> bool:
    return all((run_dir / f"ready{rank}").exists() for rank in range(2))


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.parity),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_signals_during_work(number: int, code: int, tmp_path, assert_session_empty) -> None:
    parent = _start(tmp_path)
    wait_until(lambda: _is_working(tmp_path), 60, "workers never began")
    parent.send_signal(number)
    errors = _end(parent)
    assert parent.returncode == code
    assert errors == b""
    assert_session_empty(parent.pid)
