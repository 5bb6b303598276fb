"""Which of several failures came first, and how to say so.

Owns the choice between causes and consequences and the texts of E401. Reads the ranks' rings and the
watchdogs' findings from the run folder. Knows nothing of torch or of processes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from meshwright.comm.log import RingState
from meshwright.comm.watchdog import (
    ORDER_RULE,
    RunFiles,
    compare_rings,
    describe_stall,
    read_findings,
    read_rings,
    waiting_in,
)
from meshwright.errors import MeshwrightError, WorkerError
from meshwright.launching.messages import Failure


def find_cause(failures: Sequence[Failure]) -> Failure | None:
    """The earliest failure that is not the loss of a peer; None when all are."""
    causes = [failure for failure in failures if not failure.consequence]
    return min(causes, key=lambda failure: failure.seconds, default=None)


def explain_failures(failures: Sequence[Failure], files: RunFiles, world_size: int) -> MeshwrightError:
    """The one error to show for all that went wrong in a run.

    A watchdog's finding comes first, then a worker's own error about user input, then ranks that left the
    common order, then the first rank that died.
    """
    assert failures, "nothing failed"
    findings = read_findings(files)
    if findings:
        return WorkerError(findings[0].code, findings[0].message)
    states = read_rings(files.events, world_size)
    cause = find_cause(failures)
    if cause is None or (cause.kind == "signal" and cause.status == signal.SIGABRT) or _is_disorder(cause):
        divergence = compare_rings(states)
        if divergence is not None:
            return WorkerError("E404", f"{ORDER_RULE} {divergence.describe()}")
    if cause is None:
        return _only_consequences(failures, states)
    if cause.error is not None:
        return cause.error
    return WorkerError("E401", _describe_cause(cause, files, states))


def _is_disorder(cause: Failure) -> bool:
    return cause.error is not None and cause.error.code == "E404"


def _only_consequences(failures: Sequence[Failure], states: Sequence[RingState]) -> WorkerError:
    first = min(failures, key=lambda failure: failure.seconds)
    stall = describe_stall(states, time.time()).text
    said = first.error.message if first.error is not None else f"rank {first.rank}: {first.summary}"
    return WorkerError("E401", f"{said}. No rank that failed by itself was seen. {stall}".rstrip())


def _describe_cause(cause: Failure, files: RunFiles, states: Sequence[RingState]) -> str:
    state = next((state for state in states if state.rank == cause.rank), None)
    step = f" at step {state.step:,}" if state is not None and state.step >= 0 else ""
    log = files.log(cause.rank)
    where = f"full output: {log}" if log.exists() else "its output is above"
    if cause.kind == "exception":
        head = f"rank {cause.rank} raised {cause.summary}{step}\n{cause.frames.rstrip()}\n{where}"
    else:
        head = f"rank {cause.rank} {_ending(cause)}{step}{_doing(state, states)}; {where}"
    return "\n".join([head, *_describe_others(cause, states)])


def _ending(cause: Failure) -> str:
    if cause.kind == "exit":
        said = f" ({cause.summary})" if cause.summary else ""
        return f"exited with code {cause.status}{said}"
    try:
        name = f" ({signal.Signals(cause.status).name})"
    except ValueError:
        name = ""
    return f"died: signal {cause.status}{name}"


def _doing(state: RingState | None, states: Sequence[RingState]) -> str:
    if state is None:
        return ""
    event = waiting_in(state, states)
    return f" in {event.describe()}" if event is not None else f" in {state.phase}"


def _describe_others(cause: Failure, states: Sequence[RingState]) -> list[str]:
    """`3 other ranks waited in all_reduce #12 over dp (reduce bucket 0): consequence, not cause`."""
    waits: dict[str, int] = {}
    for state in states:
        event = waiting_in(state, states)
        if state.rank != cause.rank and event is not None:
            what = f"{event.op} #{event.ordinal:,} of axis {event.axis} ({event.cause})"
            waits[what] = waits.get(what, 0) + 1
    return [
        f"{count} other {'rank' if count == 1 else 'ranks'} waited in {what}: consequence, not cause"
        for what, count in waits.items()
    ]
