"""What a launcher tells its workers, and what they answer.

Plain values that travel by pickle. Knows nothing of torch, of processes or of how failures are explained.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshwright.comm.watchdog import RunFiles
from meshwright.errors import MeshwrightError


@dataclass(frozen=True)
class WorkerContext:
    """What a worker knows of its run besides the world.

    Attributes:
        rank: global rank.
        run_dir: the run folder.
        output_fd: the user's standard output on rank 0, None elsewhere.
        error_fd: the user's standard error on rank 0, None elsewhere.
    """

    rank: int
    run_dir: Path
    output_fd: int | None = None
    error_fd: int | None = None

    @property
    def files(self) -> RunFiles:
        """Where the run keeps its diagnostic files."""
        return RunFiles(self.run_dir)

    @property
    def ring(self) -> Path:
        """Where this rank's log keeps its ring."""
        return self.files.ring(self.rank)


@dataclass(frozen=True)
class WorkerOrder:
    """All that a local worker needs to begin.

    Attributes:
        rank: global rank, which is also the local one.
        run_dir: the run folder.
        call: pickled `target(world, context)`, unpickled only when errors can be reported.
        environment: the whole environment of the worker.
        num_threads: threads of one operation.
        keep_terminal: whether standard output and error stay the user's instead of going to a log.
    """

    rank: int
    run_dir: Path
    call: bytes
    environment: dict[str, str]
    num_threads: int
    keep_terminal: bool


@dataclass(frozen=True)
class Success:
    """The target returned.

    Attributes:
        result: what it returned.
    """

    result: Any


@dataclass(frozen=True)
class Failure:
    """A rank raised, exited or was killed.

    Attributes:
        rank: global rank.
        kind: `exception`, `signal` or `exit`.
        seconds: when, since the epoch.
        status: signal number or exit code; 1 for exceptions.
        summary: `ValueError: text` of an exception.
        frames: its last frames, as Python prints them.
        error: the exception, if it is one of ours.
        consequence: whether it only says that a peer was lost.
    """

    rank: int
    kind: Literal["exception", "signal", "exit"]
    seconds: float
    status: int = 1
    summary: str = ""
    frames: str = ""
    error: MeshwrightError | None = None
    consequence: bool = False
