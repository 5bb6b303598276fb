"""What a job script is made from. Knows no launcher."""

from __future__ import annotations

import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class JobRequest:
    """A run on several hosts.

    Attributes:
        name: of the job; letters, digits, `-` and `_`.
        command: what each process runs.
        folder: working directory, the same path on every host.
        nodes: hosts.
        per_node: processes on each, one a device.
        gpus: whether the devices are GPUs.
        restarts: how often a failed run is started again, each time from its newest checkpoint.
    """

    name: str
    command: tuple[str, ...]
    folder: str
    nodes: int
    per_node: int
    gpus: bool
    restarts: int

    @property
    def command_line(self) -> str:
        """The command, quoted for a shell."""
        return shlex.join(self.command)
