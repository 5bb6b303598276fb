"""Runs on several hosts: `meshwright.launch.slurm(...)` and `meshwright.launch.ssh(...)` make job scripts.

Owns the checks before a script is printed, and handing it to the launcher. The texts stand in `scripts/`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.launching.scripts.request import JobRequest
from meshwright.launching.scripts.slurm import SlurmOptions, slurm_script
from meshwright.launching.scripts.ssh import ssh_script
from meshwright.training.config import load_config
from meshwright.training.planning import plan_of

DEFAULT_RESTARTS = 3
DEFAULT_PORT = 29400


@dataclass(frozen=True)
class Job:
    """A job script and how it is started.

    Attributes:
        script: the text.
        launcher: the program that takes its path, e.g. `sbatch`.
    """

    script: str
    launcher: str

    def submit(self) -> str:
        """Hand the script to its launcher; returns what that printed.

        Raises:
            ConfigError: E123 where the launcher is not installed or refuses.
        """
        program = shutil.which(self.launcher)
        if program is None:
            raise ConfigError(
                "E123",
                f"{self.launcher} is not on this host's PATH. Save the script (--out FILE) and start it where it is.",
            )
        with tempfile.NamedTemporaryFile("w", suffix=".sh", delete=False) as file:
            file.write(self.script)
        done = subprocess.run([program, file.name], capture_output=True, text=True, check=False)
        Path(file.name).unlink()
        if done.returncode:
            reason = (done.stderr or done.stdout).strip()
            raise ConfigError("E123", f"{self.launcher} ended with code {done.returncode}: {reason}")
        return done.stdout.strip()


def slurm(  # noqa: PLR0913 - the options of a job
    run_file: str | Path,
    *overrides: str,
    nodes: int = 1,
    gpus_per_node: int = 0,
    processes_per_node: int = 0,
    restarts: int = DEFAULT_RESTARTS,
    time: str = "",
    partition: str = "",
    account: str = "",
    cpus_per_task: int | None = None,
    requeue: bool = True,
) -> Job:
    """A batch script that trains `run_file` on `nodes` hosts and goes on from its newest checkpoint.

    Args:
        run_file: a run file (.toml).
        *overrides: texts `a.b=c`.
        nodes: hosts.
        gpus_per_node: GPUs of each, one process a GPU; 0: CPU processes.
        processes_per_node: CPU processes of each host where there are no GPUs.
        restarts: how often a failed run is started again inside the job.
        time: limit, e.g. `24:00:00`.
        partition: where to queue.
        account: who pays.
        cpus_per_task: cores of each process.
        requeue: whether the job queues again at its time limit.

    Raises:
        MeshwrightError: what the run file and its plan raise; E123 for numbers that make no job.
    """
    sizes = (nodes, gpus_per_node, processes_per_node, restarts)
    job = _request(run_file, overrides, sizes)
    options = SlurmOptions(time, partition, account, cpus_per_task, requeue)
    return Job(slurm_script(job, options), "sbatch")


def ssh(  # noqa: PLR0913 - the options of a job
    run_file: str | Path,
    *overrides: str,
    hosts: Sequence[str],
    gpus_per_node: int = 0,
    processes_per_node: int = 0,
    restarts: int = DEFAULT_RESTARTS,
    port: int = DEFAULT_PORT,
    python: str = "python3",
    interface: str = "",
) -> Job:
    """A shell script that trains `run_file` by torchrun on `hosts`; arguments as of `slurm`.

    Args:
        run_file: a run file (.toml), at the same path on every host.
        *overrides: texts `a.b=c`.
        hosts: names that ssh knows.
        gpus_per_node: GPUs of each, one process a GPU; 0: CPU processes.
        processes_per_node: CPU processes of each host where there are no GPUs.
        restarts: how often a failed run is started again.
        port: of the meeting on the first host.
        python: the interpreter on every host.
        interface: network interface between the hosts; empty: found by itself.

    Raises:
        MeshwrightError: as `slurm`.
    """
    sizes = (len(hosts), gpus_per_node, processes_per_node, restarts)
    job = _request(run_file, overrides, sizes)
    return Job(ssh_script(job, hosts, port=port, python=python, interface=interface), "bash")


def _request(run_file: str | Path, overrides: Sequence[str], sizes: tuple[int, int, int, int]) -> JobRequest:
    nodes, gpus, processes, restarts = sizes
    per_node = gpus or processes or 1
    if nodes < 1 or per_node < 1 or restarts < 0:
        raise ConfigError("E123", f"{nodes} nodes x {per_node} processes, {restarts} restarts make no job")
    path = Path(run_file)
    resolved = load_config(path, overrides)
    plan_of(resolved.config, world_size=nodes * per_node)  # what cannot run is not queued
    if resolved.config.save.every is None:
        raise ConfigError(
            "E123",
            'save.every is not set: a restarted job would start at step 0. Set e.g. save.every="30min" in the run '
            "file, or as an argument.",
        )
    command = ("meshwright", "train", str(path), *overrides, "--resume", "auto")
    name = re.sub(r"[^\w-]+", "-", path.stem)
    return JobRequest(name, command, str(Path.cwd()), nodes, per_node, gpus > 0, restarts)
