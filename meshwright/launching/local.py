"""N workers on this machine, without torchrun: start them, wait for all, end them whatever happens.

Owns the processes, the signals that the launcher gets while they live, and the promise that none is left. The
launcher never imports torch: workers are forked from a server that has (Linux), or import it anew (macOS).

Simplification: when this function runs outside the main thread, signals stay with whoever handles them there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.comm.watchdog import RunFiles
from meshwright.errors import WorkerError
from meshwright.launching.failures import explain_failures, find_cause
from meshwright.launching.messages import Failure, Success, WorkerContext, WorkerOrder
from meshwright.launching.ports import LOOPBACK, choose_port

if TYPE_CHECKING:
    from meshwright.comm.mesh import World

# The last one is what making any torch optimizer imports: seconds in every worker, or once in the server.
PRELOAD = ("torch", "torch.distributed", "numpy", "meshwright.launching.worker", "torch._dynamo")
_POLL_SECONDS = 0.2
_EXIT_SECONDS = 10.0  # for a worker that has answered to end by itself
_TERMINATE_SECONDS = 2.0  # between SIGTERM and SIGKILL
_SETTLE_SECONDS = 0.3  # after a first failure, for an earlier one to be heard
_CAUSE_SECONDS = 3.0  # after a consequence, for its cause to be heard


@dataclass
class _Worker:
    """One process and what it has answered."""

    rank: int
    process: Any
    pipe: Connection
    answer: Success | Failure | None = None


@dataclass
class _Interrupt:
    """The signal that asked the launcher to stop; 0 while none has."""

    number: int = 0

    def receive(self, number: int, _frame: object) -> None:
        """Signal handler."""
        self.number = number

    def check(self) -> None:
        """Raise what the signal means."""
        if self.number == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        if self.number:
            raise KeyboardInterrupt


@dataclass
class _Starter:
    """Starts workers from a thread: the first start waits for the server's imports, and Ctrl-C must not."""

    workers: list[_Worker]
    cancelled: bool = False
    error: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._start_all, name="start-workers", daemon=True)
        self.thread.start()

    def _start_all(self) -> None:
        try:
            for worker in self.workers:
                worker.process.start()
                if self.cancelled:
                    _signal_group(worker, signal.SIGKILL)
                    return
        except BaseException as error:
            self.error = error


def run_local(
    target: Callable[[World, WorkerContext], Any],
    *,
    processes: int,
    run_dir: Path,
    keep_terminal: bool = False,
) -> list[Any]:
    """Results of `target(world, context)` on `processes` local ranks, in rank order.

    Args:
        target: importable by name (or a `functools.partial` of such), and with it its arguments and results
            picklable.
        processes: number of ranks.
        run_dir: run folder; `events`, `logs` and `errors` in it are emptied.
        keep_terminal: rank 0 writes to the launcher's standard output and error instead of its log.

    Raises:
        WorkerError: E401 a rank died or raised, E402 it hung, E404 ranks disagree; E403 the port is taken;
            E405 this platform cannot run workers.
        MeshwrightError: what a worker raised about the user's input.
        KeyboardInterrupt: after Ctrl-C; SystemExit(143) after SIGTERM. No worker is left either way.
    """
    method = start_method(sys.platform)
    assert processes > 0, f"processes={processes} must be positive"
    files = RunFiles(run_dir.resolve())
    environment = _environment(processes)
    call = pickle.dumps(target)
    files.clear()
    with _signals() as interrupt:
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            _ensure_server(context)
        workers, far_ends = _make_workers(context, files, call, environment=environment, keep=keep_terminal)
        starter = _Starter(workers)
        try:
            _wait_for_start(starter, interrupt)
            for end in far_ends:
                end.close()
            return _collect(workers, files, interrupt)
        finally:
            starter.cancelled = True
            _stop(workers)


def start_method(platform: str) -> str:
    """How multiprocessing starts workers on `platform` (as `sys.platform` names it).

    Raises:
        WorkerError: E405 on a platform that is neither Linux nor macOS.
    """
    if platform.startswith("linux"):
        return "forkserver"
    if platform == "darwin":
        return "spawn"
    raise WorkerError(
        "E405",
        f"cannot start workers on platform {platform!r}; use Linux, macOS, or on Windows Linux in WSL 2.",
    )


def num_cores() -> int:
    """Cores that this process may use."""
    if sys.platform.startswith("linux"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _environment(processes: int) -> dict[str, str]:
    """The environment common to all ranks: the launcher's, plus where they meet."""
    own = dict(os.environ)
    for name in [name for name in own if name.startswith("TORCHELASTIC_")]:
        del own[name]
    threads = str(max(1, num_cores() // processes))
    return {
        "OMP_NUM_THREADS": threads,
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        **own,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(choose_port(own.get("MASTER_PORT"))),
    }


@contextlib.contextmanager
def _signals() -> Iterator[_Interrupt]:
    """Note SIGINT and SIGTERM instead of raising wherever the launcher happens to be."""
    interrupt = _Interrupt()
    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            # A launcher in the background of a shell ignores SIGINT, and goes on doing so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, interrupt.receive)
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _ensure_server(context: Any) -> None:
    context.set_forkserver_preload(list(PRELOAD))
    resource_tracker.ensure_running()
    # The server ignores SIGINT only once its imports are done; until then the inherited mask keeps it quiet.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _make_workers(
    context: Any, files: RunFiles, call: bytes, *, environment: dict[str, str], keep: bool
) -> tuple[list[_Worker], list[Connection]]:
    """The workers, not started, and the pipe ends to close once they are."""
    terminal = (Connection(os.dup(1), readable=False), Connection(os.dup(2), readable=False))
    workers, far_ends = [], [*terminal]
    for rank in range(int(environment["WORLD_SIZE"])):
        near, far = context.Pipe(duplex=False)
        order = WorkerOrder(
            rank=rank,
            run_dir=files.root,
            call=call,
            environment={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            num_threads=int(environment["OMP_NUM_THREADS"]),
            keep_terminal=keep and rank == 0,
        )
        process = context.Process(target=_enter, args=(order, far, terminal if rank == 0 else None))
        workers.append(_Worker(rank, process, near))
        far_ends.append(far)
    return workers, far_ends


def _enter(order: WorkerOrder, answers: Connection, terminal: tuple[Connection, Connection] | None) -> None:
    # Imported here because it needs torch, which the launcher, who imports this module, must not load.
    from meshwright.launching.worker import serve

    serve(order, answers, terminal)


def _wait_for_start(starter: _Starter, interrupt: _Interrupt) -> None:
    while starter.thread.is_alive():
        starter.thread.join(_POLL_SECONDS / 4)
        interrupt.check()
    if starter.error is not None:
        raise WorkerError("E401", f"workers could not be started: {starter.error!r}") from starter.error


def _collect(workers: list[_Worker], files: RunFiles, interrupt: _Interrupt) -> list[Any]:
    """Wait for every answer.

    After a first failure only as long as it takes to hear of the one that caused it.
    """
    deadline = None
    while any(worker.answer is None for worker in workers):
        interrupt.check()
        _listen(workers)
        failures = [worker.answer for worker in workers if isinstance(worker.answer, Failure)]
        if not failures:
            continue
        if deadline is None:
            deadline = time.monotonic() + _CAUSE_SECONDS
        if find_cause(failures) is not None:
            deadline = min(deadline, time.monotonic() + _SETTLE_SECONDS)
        if time.monotonic() >= deadline:
            break
    interrupt.check()
    failures = [worker.answer for worker in workers if isinstance(worker.answer, Failure)]
    if failures:
        raise explain_failures(failures, files, len(workers))
    _wait_for_exits(workers, interrupt)
    return [worker.answer.result for worker in workers if isinstance(worker.answer, Success)]


def _listen(workers: list[_Worker]) -> None:
    """Take what workers answered, or how they ended, within one polling interval."""
    pending = [worker for worker in workers if worker.answer is None]
    wait([handle for worker in pending for handle in (worker.pipe, worker.process.sentinel)], _POLL_SECONDS)
    for worker in pending:
        # Looked at before the pipe: an answer that is not there yet after this never comes.
        status = worker.process.exitcode
        try:
            if worker.pipe.poll(0):
                worker.answer = pickle.loads(worker.pipe.recv_bytes())
                continue
        except (EOFError, ConnectionResetError):
            worker.process.join(_TERMINATE_SECONDS)
            status = worker.process.exitcode
        if status is not None:
            kind: Any = "signal" if status < 0 else "exit"
            worker.answer = Failure(worker.rank, kind, time.time(), status=abs(status))


def _wait_for_exits(workers: list[_Worker], interrupt: _Interrupt) -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    while any(worker.process.exitcode is None for worker in workers) and time.monotonic() < deadline:
        interrupt.check()
        alive = [worker.process.sentinel for worker in workers if worker.process.exitcode is None]
        wait(alive, _POLL_SECONDS)


def _stop(workers: list[_Worker]) -> None:
    """End every worker and whatever it started: SIGTERM, two seconds, SIGKILL."""
    started = [worker for worker in workers if worker.process.pid is not None]
    if any(worker.process.exitcode is None for worker in started):
        for worker in started:
            _signal_group(worker, signal.SIGTERM)
        deadline = time.monotonic() + _TERMINATE_SECONDS
        for worker in started:
            worker.process.join(max(0.0, deadline - time.monotonic()))
    for worker in started:
        _signal_group(worker, signal.SIGKILL)
        worker.process.join(_TERMINATE_SECONDS)
        worker.pipe.close()


def _signal_group(worker: _Worker, number: int) -> None:
    """Signal the worker and its children, which share its process group once it has made one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, number)
        return
    if worker.process.exitcode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, number)
