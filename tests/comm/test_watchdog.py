"""Comparing rings, describing stalls, and the thread; without any network."""

import json
import queue
import subprocess
import sys
from dataclasses import replace

import pytest

from meshwright.comm.log import CommLog, RingState
from meshwright.comm.watchdog import (
    Finding,
    RunFiles,
    Watchdog,
    compare_rings,
    describe_stall,
    diagnose,
    parse_peers,
    read_findings,
)

Call = tuple[str, str, int]  # op, cause, elements


def _ring(
    rank: int, calls: list[Call], *, finished: int = 99, world: int = 2, axis: str = "dp", phase: str = "data"
) -> RingState:
    log = CommLog(rank, world)
    peers = ",".join(map(str, range(world)))
    for number, (op, cause, numel) in enumerate(calls):
        sequence = log.start(
            op, axis, peers=peers, dtype="float32", numel=numel, nbytes=4 * numel, cause=cause
        )
        if number < finished:
            log.finish(sequence)
    log.progress(phase, 3)
    return log.state()


def _steps(*causes: str, numel: int = 100) -> list[Call]:
    return [("all_reduce", cause, numel) for cause in causes]


def test_equal_and_shorter_rings_do_not_diverge() -> None:
    assert compare_rings([_ring(0, _steps("a", "b", "c")), _ring(1, _steps("a", "b"))]) is None
    assert compare_rings([]) is None


def test_size_mismatch_is_named() -> None:
    found = compare_rings([_ring(0, _steps("a", "b")), _ring(1, [*_steps("a"), ("all_reduce", "b", 101)])])
    assert found is not None
    assert found.culprits == (1,)
    assert found.describe() == (
        "rank 0 issued all_reduce of 100 float32 (b), rank 1 issued all_reduce of 101 float32 (b) as #1 over dp."
    )


@pytest.mark.parametrize("culprit", [0, 1])
def test_skip_is_told_from_what_follows(culprit: int) -> None:
    whole, skipping = _steps("a", "b", "c", "d"), _steps("a", "c", "d")
    rings = [_ring(rank, skipping if rank == culprit else whole) for rank in range(2)]
    found = compare_rings(rings)
    assert found is not None
    assert found.culprits == (culprit,)
    assert found.describe().endswith(f"Rank {culprit} skipped all_reduce of 100 float32 (b).")


def test_ambiguous_order_blames_no_skip() -> None:
    found = compare_rings([_ring(0, _steps("a", "b", "a")), _ring(1, _steps("b", "a", "b"))])
    assert found is not None
    assert found.skipped_by is None


def test_majority_is_believed() -> None:
    rings = [_ring(rank, _steps("odd" if rank == 0 else "same"), world=3) for rank in range(3)]
    found = compare_rings(rings)
    assert found is not None
    assert (found.found_rank, found.expected_rank) == (0, 1)


def test_comparison_works_after_the_ring_has_wrapped() -> None:
    causes = [f"bucket {number}" for number in range(400)]
    rings = [_ring(0, _steps(*causes)), _ring(1, _steps(*causes[:350], *causes[351:]))]
    found = compare_rings(rings)
    assert found is not None
    assert (found.ordinal, found.skipped_by) == (350, 1)


def test_messages_and_other_axes_are_not_compared() -> None:
    sends = [("send", "activation", 7), *_steps("a")]
    receives = [*_steps("a"), ("receive", "activation", 9)]
    assert compare_rings([_ring(0, sends), _ring(1, receives)]) is None
    assert compare_rings([_ring(0, _steps("a"), axis="tp"), _ring(1, _steps("b"))]) is None


def test_stall_names_waiting_ranks_laggard_phase_and_stack() -> None:
    waiting = [_ring(rank, _steps("reduce bucket 0"), finished=0, world=4) for rank in range(3)]
    late = _ring(3, [], world=4, phase="data")
    stall = describe_stall([*waiting, late], now=late.progressed + 290)
    assert stall.culprits == (3,)
    assert stall.text == (
        "Ranks 0-2 wait in all_reduce #0 (dp, reduce bucket 0); rank 3 never entered it: it is in data of step 3, "
        "for 290 s (stack: logs/rank3.stack)."
    )


def test_stall_finds_the_awaited_operation_among_overlapped_ones() -> None:
    early = _ring(0, _steps("one", "two"), finished=0)
    late = _ring(1, _steps("one"), finished=0)
    assert "Rank 0 waits in all_reduce #1 (dp, two)" in describe_stall([early, late], now=0.0).text


def test_unseen_rank_is_said_to_be_unseen() -> None:
    stall = describe_stall([_ring(0, _steps("a"), finished=0)], now=0.0)
    assert "rank 1 never entered it, as far as can be seen: it left no ring here" in stall.text


def test_operation_that_all_entered() -> None:
    stall = describe_stall([_ring(0, _steps("a"), finished=0), _ring(1, _steps("a"))], now=0.0)
    assert stall.text == "Rank 0 waits in all_reduce #0 (dp, a); every rank entered it, rank 1 went on."


@pytest.mark.parametrize(("text", "ranks"), [("0,2,5", (0, 2, 5)), ("0..6/2", (0, 2, 4, 6)), ("", ())])
def test_peers(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_peers(text) == ranks


def test_diagnosis_prefers_disorder() -> None:
    rings = [_ring(0, _steps("a"), finished=0), _ring(1, _steps("b"), finished=0)]
    assert diagnose(rings, rank=0, seconds=300, now=0.0).code == "E404"
    stalled = diagnose(rings[:1], rank=0, seconds=300, now=0.0)
    assert (stalled.code, stalled.culprits) == ("E402", (1,))
    assert stalled.message.startswith("no progress for 300 s. Rank 0 waits")


def test_thread_reports_what_it_found(tmp_path) -> None:
    files = RunFiles(tmp_path)
    files.clear()
    log = CommLog(0, 2, files.ring(0))
    found: queue.Queue[Finding] = queue.Queue()
    with Watchdog(log, limit_seconds=0.2, folder=tmp_path, world_size=2, on_stall=found.put):
        log.start("all_gather", "dp", peers="0,1", dtype="float32", numel=1, nbytes=4, cause="gather root")
        finding = found.get(timeout=10)
    assert finding.code == "E402"
    assert "Rank 0 waits in all_gather #0 (dp, gather root)" in finding.message
    assert read_findings(files) == [finding]
    assert json.loads(files.finding(0).read_text())["culprits"] == [1]


def test_thread_is_silent_while_something_moves_or_nothing_is_in_flight() -> None:
    log = CommLog(0, 2)
    found: queue.Queue[Finding] = queue.Queue()
    with Watchdog(log, limit_seconds=0.3, folder=None, world_size=2, on_stall=found.put):
        with pytest.raises(queue.Empty):
            found.get(timeout=0.8)
        sequence = log.start("barrier", "dp", peers="0,1", dtype="float32", numel=0, nbytes=0, cause="end")
        for number in range(20):
            log.progress(f"phase {number}")
            with pytest.raises(queue.Empty):
                found.get(timeout=0.04)
        log.finish(sequence)
        with pytest.raises(queue.Empty):
            found.get(timeout=0.8)


def test_default_ends_the_process_with_code_5() -> None:
    code = (
        "import time; from meshwright.comm.log import CommLog; from meshwright.comm.watchdog import Watchdog\n"
        "log = CommLog(0, 2)\n"
        "log.start('all_reduce', 'dp', peers='0,1', dtype='float32', numel=1, nbytes=4, cause='x')\n"
        "Watchdog(log, limit_seconds=0.2, folder=None, world_size=2).start()\n"
        "time.sleep(60)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 5
    assert ended.stderr.startswith("E402 no progress for 0.2 s. Rank 0 waits in all_reduce #0 (dp, x)")


def test_findings_come_earliest_first_and_torn_ones_are_left_out(tmp_path) -> None:
    files = RunFiles(tmp_path)
    files.clear()
    first = Finding("E402", "first", 1, (0,), 10.0)
    for finding in (first, replace(first, rank=0, message="second", seconds=11.0)):
        fields = {name: getattr(finding, name) for name in ("code", "message", "rank", "seconds")}
        files.finding(finding.rank).write_text(json.dumps({**fields, "culprits": list(finding.culprits)}))
    files.finding(2).write_text('{"code": "E4')
    assert [finding.message for finding in read_findings(files)] == ["first", "second"]


def test_clear_removes_what_an_earlier_run_left(tmp_path) -> None:
    files = RunFiles(tmp_path)
    files.clear()
    kept = tmp_path / "metrics.jsonl"
    for path in (files.ring(0), files.log(0), files.stack(0), files.finding(0), kept):
        path.write_text("old")
    files.clear()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [kept]
