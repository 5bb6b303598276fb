"""Two hosts made of network namespaces, torchrun on both; a worker of the second dies, and nobody notices.

Namespaces have their own interfaces, addresses and ports; the file system is shared, as a cluster's is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from launch_processes import wait_until

from meshwright.checkpoint.folder import find_checkpoints, read_manifest
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.testing.hosts import Host, two_hosts, why_no_hosts

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 300
RUN = f"""\
[model]
source = "preset:mlp-digits"
[data]
train = "digits"
[train]
global_batch = 32
stop_at = "{NUM_STEPS} steps"
eval_every = "end"
[plan]
dp = 2
zero = 2
precision = "fp64"
[save]
every = "10 steps"
[log]
print_every = "100 steps"
"""


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    reason = why_no_hosts()
    if reason:
        pytest.skip(f"network namespaces are not allowed here: {reason}")
    with two_hosts() as made:
        yield made


def torchrun(host: Host, first: Host, folder: Path) -> subprocess.Popen[str]:
    """An agent with one worker on `host`, as a user starts it there."""
    command = host.command(sys.executable, "-m", "torch.distributed.run")
    command += ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d"]
    command += [f"--rdzv-endpoint={first.address}:29400", "--rdzv-id=two", f"--local-addr={host.address}"]
    # Said aloud: the name of this machine leads to none of the two addresses.
    command += [f"--rdzv-conf=is_host={int(host is first)},read_timeout=300"]
    command += ["-m", "meshwright", "train", "digits.toml", "save.dir=hosts", "--resume", "auto"]
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {
        **{k: v for k, v in os.environ.items() if k not in left_out},
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": host.interface,
    }
    with (folder / f"{host.address}.log").open("w") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, text=True)


def workers_of(host: Host) -> list[int]:
    """Processes that train, without the agent that started them."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in host.pids()}
    return [pid for pid, words in commands.items() if b"meshwright" in words and b"--nnodes=2" not in words]


def lines_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_state(one: Path, other: Path) -> None:
    """Newest checkpoints hold the same parameters and optimizer state, and stand at the same sample."""
    paths = [find_checkpoints(run)[0] for run in (one, other)]
    manifests = [read_manifest(path) for path in paths]
    assert manifests[0].run.step == manifests[1].run.step == NUM_STEPS
    assert manifests[0].run.samples == manifests[1].run.samples == 32 * NUM_STEPS
    with CheckpointReader(paths[0]) as first, CheckpointReader(paths[1]) as second:
        compared = [tensor for tensor in manifests[0].tensors if tensor.kind in ("parameter", "optimizer")]
        known = {(tensor.kind, tensor.name, tensor.slot): tensor for tensor in manifests[1].tensors}
        assert len(compared) > 10
        for tensor in compared:
            twin = known[tensor.kind, tensor.name, tensor.slot]
            torch.testing.assert_close(first.read(tensor), second.read(twin), rtol=1e-12, atol=1e-12)


@pytest.mark.parity
def test_a_run_on_two_hosts_outlives_a_worker(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    (tmp_path / "digits.toml").write_text(RUN)
    agents = [torchrun(host, hosts[0], tmp_path) for host in hosts]
    run = tmp_path / "hosts"
    wait_until(lambda: bool(find_checkpoints(run)), 300, "a first checkpoint")
    (victim,) = workers_of(hosts[1])
    os.kill(victim, signal.SIGKILL)
    codes = [agent.wait(300) for agent in agents]
    printed = "".join((tmp_path / f"{host.address}.log").read_text() for host in hosts)
    assert codes == [0, 0], printed
    assert printed.count("resume hosts/ckpt/step-") == 1, printed

    command = [sys.executable, "-m", "meshwright", "train", "digits.toml", "save.dir=one", "save.every=end"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    lines, expected = lines_of(run), lines_of(tmp_path / "one")
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    for line, other in zip(lines, expected, strict=True):
        for name in ("step", "tokens", "lr"):
            assert line[name] == other[name]
        for name in ("loss", "grad_norm"):
            assert line[name] == pytest.approx(other[name], rel=1e-12)
    assert lines[-1]["eval_loss"] == pytest.approx(expected[-1]["eval_loss"], rel=1e-12)
    assert_same_state(run, tmp_path / "one")
