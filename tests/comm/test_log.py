"""The ring: what another process reads, wrapping, ordinals, digests."""

import os
import signal
import subprocess
import sys

from meshwright.comm.log import RING_SIZE, CommLog, read_ring, ring_path


def _record(log: CommLog, op: str = "all_reduce", axis: str = "dp", cause: str = "test") -> int:
    return log.start(op, axis, peers="0,1", dtype="float32", numel=1000, nbytes=4000, cause=cause)


def test_another_reader_sees_events_step_and_phase(tmp_path) -> None:
    path = ring_path(tmp_path / "events", 1)
    log = CommLog(1, 2, path)
    log.progress("forward", 12)
    done = _record(log, cause="reduce bucket 0")
    log.finish(done)
    _record(log, cause="reduce bucket 1")
    state = read_ring(path)
    assert state is not None
    assert (state.rank, state.world_size, state.pid) == (1, 2, os.getpid())
    assert (state.step, state.phase, state.num_started) == (12, "forward", 2)
    assert [bool(event.finished) for event in state.events] == [True, False]
    assert state.last is not None
    assert state.last.describe() == "all_reduce #1 of 1,000 float32 over dp (reduce bucket 1)"
    assert state == log.state()


def test_ring_keeps_the_last_events_with_their_numbers(tmp_path) -> None:
    log = CommLog(path=ring_path(tmp_path, 0))
    for _ in range(RING_SIZE + 44):
        log.finish(_record(log))
    state = read_ring(ring_path(tmp_path, 0))
    assert state is not None
    assert [event.sequence for event in state.events] == list(range(44, RING_SIZE + 44))
    assert [event.ordinal for event in state.events] == list(range(44, RING_SIZE + 44))
    assert log.in_flight == {}


def test_ordinals_count_collectives_by_axis_and_messages_apart() -> None:
    log = CommLog()
    calls = [("all_reduce", "dp"), ("send", "dp"), ("broadcast", "tp"), ("barrier", "dp"), ("send", "dp")]
    for op, axis in calls:
        _record(log, op, axis)
    assert [event.ordinal for event in log.events()] == [0, 0, 0, 1, 1]


def test_digests_are_equal_exactly_for_equal_calls() -> None:
    a, b = CommLog(0, 2), CommLog(1, 2)
    for log in (a, b):
        _record(log, cause="one")
    assert a.digest("dp") == b.digest("dp")
    _record(a, axis="tp")
    assert a.digest("dp") == b.digest("dp")
    _record(a, cause="two")
    _record(b, cause="three")
    assert a.digest("dp") != b.digest("dp")


def test_counters_start_anew_without_losing_the_ring() -> None:
    log = CommLog()
    _record(log)
    _record(log)
    assert log.calls["all_reduce", "dp"] == 2
    assert log.bytes["all_reduce", "dp"] == 8000
    log.reset_counters()
    assert not log.calls
    assert len(log.events()) == 2


def test_long_texts_are_cut_not_refused() -> None:
    log = CommLog()
    _record(log, cause="gather " + "é" * 100)
    log.progress("p" * 100)
    assert log.events()[0].cause.startswith("gather éé")
    assert log.state().phase == "p" * 64


def test_unreadable_rings_are_none(tmp_path) -> None:
    assert read_ring(tmp_path / "absent") is None
    (tmp_path / "short").write_bytes(b"MWRING01")
    assert read_ring(tmp_path / "short") is None
    (tmp_path / "other").write_bytes(b"x" * 100_000)
    assert read_ring(tmp_path / "other") is None


def test_ring_survives_a_kill(tmp_path) -> None:
    path = ring_path(tmp_path, 0)
    code = (
        "import os, signal, sys; from pathlib import Path; from meshwright.comm.log import CommLog\n"
        "log = CommLog(0, 1, Path(sys.argv[1]))\n"
        "log.start('all_gather', 'dp', peers='0', dtype='float32', numel=1, nbytes=4, cause='last words')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)])
    assert ended.returncode == -signal.SIGKILL
    state = read_ring(path)
    assert state is not None
    assert state.last is not None
    assert (state.last.op, state.last.cause, state.last.finished) == ("all_gather", "last words", 0.0)
