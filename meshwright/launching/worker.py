"""The life of one worker process: set up, call the target, answer.

Owns what a worker does to itself: process group, signals, environment, logs, dumps on request, the end when
its launcher has died. Only workers import this module: it needs torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection, wait

import torch

from meshwright.comm.mesh import current_world
from meshwright.comm.watchdog import RunFiles
from meshwright.errors import MeshwrightError, WorkerError
from meshwright.launching.messages import Failure, Success, WorkerContext, WorkerOrder

# What the network says when a peer has gone, also in scripts that do not use our operations.
_LOST_PEER = ("Connection reset by peer", "Connection closed by peer", "Broken pipe", "Connection refused")
_NUM_FRAMES = 4


def serve(order: WorkerOrder, answers: Connection, terminal: tuple[Connection, Connection] | None) -> None:
    """Run the order and answer once: a `Success` or a `Failure`.

    Args:
        order: what to do.
        answers: pipe to the launcher.
        terminal: the user's standard output and error, for rank 0.
    """
    os.setpgrp()
    # Ctrl-C reaches every process of a terminal; only the launcher decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    _end_with_parent()
    try:
        os.environ.clear()
        os.environ.update(order.environment)
        torch.set_num_threads(order.num_threads)
        gc.freeze()  # what imports made stays: each full collection would walk it again, for 0.15 s
        context = _redirect(order, terminal)
        enable_dumps(context.files, order.rank)
        target = pickle.loads(order.call)
        message = pickle.dumps(Success(target(current_world(), context)))
    except BaseException as error:
        _fail(order.rank, answers, error)
        return
    answers.send_bytes(message)


def enable_dumps(files: RunFiles, rank: int) -> None:
    """Print Python stacks on fatal signals to standard error, and on SIGUSR1 to `logs/rank<N>.stack`."""
    path = files.stack(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.enable(2)
    # A bare descriptor, open for the life of the process: the handler writes to it.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a launcher"

    def watch() -> None:
        wait([parent.sentinel])
        # The group, so that processes of data loaders go too.
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-death", daemon=True).start()


def _redirect(order: WorkerOrder, terminal: tuple[Connection, Connection] | None) -> WorkerContext:
    """Send file descriptors 1 and 2 to the rank's log, what native code prints included."""
    output_fd, error_fd = (os.dup(stream.fileno()) for stream in terminal) if terminal else (None, None)
    sys.stdout.flush()
    sys.stderr.flush()
    if order.keep_terminal and output_fd is not None and error_fd is not None:
        os.dup2(output_fd, 1)
        os.dup2(error_fd, 2)
    else:
        log = RunFiles(order.run_dir).log(order.rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    # Opened anew: the inherited objects decided about buffering by what the launcher's server was given.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    return WorkerContext(order.rank, order.run_dir, output_fd, error_fd)


def _fail(rank: int, answers: Connection, error: BaseException) -> None:
    """Answer with the failure and end the process: destructors of a broken process group may never return."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        answers.send_bytes(pickle.dumps(Success(None)))
        return
    with contextlib.suppress(OSError):
        traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        answers.send_bytes(pickle.dumps(describe_failure(rank, error)))
    os._exit(_exit_status(error))


def _exit_status(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return error.exit_code if isinstance(error, MeshwrightError) else 1


def describe_failure(rank: int, error: BaseException) -> Failure:
    """The exception as a value that can be sent, whatever it holds."""
    if isinstance(error, SystemExit):
        text = "" if isinstance(error.code, int) else str(error.code)
        return Failure(rank, "exit", time.time(), status=_exit_status(error), summary=text)
    summary = "".join(traceback.format_exception_only(error)).strip()
    # The first is `serve`; those of the interpreter around a user's script say nothing.
    frames_of_call = list(traceback.extract_tb(error.__traceback__))[1:]
    own_frames = [frame for frame in frames_of_call if not frame.filename.startswith("<frozen ")]
    frames = "".join(traceback.format_list(own_frames[-_NUM_FRAMES:]))
    own = error if isinstance(error, MeshwrightError) and _can_travel(error) else None
    lost = isinstance(error, RuntimeError | OSError) and any(text in str(error) for text in _LOST_PEER)
    consequence = lost or (isinstance(error, WorkerError) and error.code == "E401")
    return Failure(
        rank, "exception", time.time(), summary=summary, frames=frames, error=own, consequence=consequence
    )


def _can_travel(error: BaseException) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
