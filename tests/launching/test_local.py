"""Local workers: results, what they see, and every way to fail."""

import os
import pickle
import socket
import subprocess
import sys

import launch_targets as targets
import pytest

from meshwright.errors import ConfigError, WorkerError
from meshwright.launching import local, run_local


def _fail(target, run_dir, processes: int = 2) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        run_local(target, processes=processes, run_dir=run_dir)
    return caught.value


def test_results_come_in_rank_order_and_output_goes_to_logs(tmp_path, capfd, assert_none_left) -> None:
    cores = local.num_cores()
    results = run_local(targets.fine, processes=2, run_dir=tmp_path)
    threads = int(os.environ.get("OMP_NUM_THREADS", max(1, cores // 2)))
    assert results == [(rank, threads, str(rank), "127.0.0.1") for rank in range(2)]
    for rank in range(2):
        lines = (tmp_path / "logs" / f"rank{rank}.log").read_text().splitlines()
        assert sorted(lines) == ["printed by a child", f"printed by rank {rank}"]
    assert capfd.readouterr() == ("", "to the user\n")
    assert_none_left(tmp_path)


def test_reductions_agree_and_delay_is_no_failure(tmp_path, assert_none_left) -> None:
    results = run_local(targets.faulty("delay", 1, 7), processes=2, run_dir=tmp_path)
    assert results == [2.0 * (targets.NUM_STEPS - 1)] * 2
    assert_none_left(tmp_path)


def test_killed_rank_is_named_first_and_peers_are_consequences(tmp_path, assert_none_left) -> None:
    error = _fail(targets.faulty("kill", 2, 7), tmp_path, processes=3)
    assert (error.code, error.exit_code) == ("E401", 5)
    assert error.message.startswith("rank 2 died: signal 9 (SIGKILL) at step 7 in data")
    assert str(tmp_path / "logs" / "rank2.log") in error.message
    expected = "2 other ranks waited in all_reduce #7 of axis dp (reduce bucket 7): consequence, not cause"
    assert expected in error.message
    assert_none_left(tmp_path)


def test_exception_shows_its_last_frames_and_the_full_trace_is_in_the_log(tmp_path, assert_none_left) -> None:
    error = _fail(targets.faulty("raise", 1, 3), tmp_path)
    assert (error.code, error.exit_code) == ("E401", 5)
    raised = "rank 1 raised meshwright.testing.faults.network.InjectedError"
    start = f"{raised}: injected before operation 3 of rank 1 at step 3"
    assert error.message.startswith(start)
    assert "in commit" in error.message
    log = tmp_path / "logs" / "rank1.log"
    assert str(log) in error.message
    assert "Traceback (most recent call last)" in log.read_text()
    assert_none_left(tmp_path)


def test_hanging_rank_is_named_with_its_phase_and_stack(tmp_path, assert_none_left) -> None:
    error = _fail(targets.faulty("hang", 1, 7), tmp_path)
    assert (error.code, error.exit_code) == ("E402", 5)
    text = error.message
    assert text.startswith("no progress for 2 s. Rank 0 waits in all_reduce #7 (dp, reduce bucket 7); ")
    assert "rank 1 never entered it: it is in data of step 7, for " in text
    assert "(stack: logs/rank1.stack)" in text
    assert "in commit" in (tmp_path / "logs" / "rank1.stack").read_text()
    assert_none_left(tmp_path)


def test_skipped_collective_is_named(tmp_path, assert_none_left) -> None:
    error = _fail(targets.faulty("skip", 1, 7), tmp_path)
    assert (error.code, error.exit_code) == ("E404", 5)
    assert (
        "rank 0 issued all_reduce of 100 float32 (reduce bucket 7), rank 1 issued all_reduce of 100 float32 "
        "(reduce bucket 8) as #7 over dp. Rank 1 skipped all_reduce of 100 float32 (reduce bucket 7)."
    ) in error.message
    assert_none_left(tmp_path)


def test_skipped_last_collective_is_a_stall(tmp_path, assert_none_left) -> None:
    error = _fail(targets.faulty("skip", 1, targets.NUM_STEPS - 1), tmp_path)
    assert error.exit_code == 5
    assert "all_reduce #19 (dp, reduce bucket 19); rank 1 never entered it" in error.message
    assert_none_left(tmp_path)


def test_size_mismatch_is_named_though_gloo_aborts(tmp_path, assert_none_left) -> None:
    error = _fail(targets.faulty("resize", 1, 7), tmp_path)
    assert (error.code, error.exit_code) == ("E404", 5)
    assert (
        "rank 0 issued all_reduce of 100 float32 (reduce bucket 7), rank 1 issued all_reduce of 101 float32 "
        "(reduce bucket 7) as #7 over dp."
    ) in error.message
    assert_none_left(tmp_path)


def test_dropped_operation_is_found_as_a_stall(tmp_path, assert_none_left) -> None:
    error = _fail(targets.faulty("drop", 1, targets.NUM_STEPS - 1), tmp_path)
    assert error.code in ("E401", "E402")
    assert "Rank 0 waits in all_reduce #19 (dp, reduce bucket 19); every rank entered it" in error.message
    assert_none_left(tmp_path)


def test_silent_exit_is_named(tmp_path, assert_none_left) -> None:
    error = _fail(targets.leave, tmp_path)
    assert error.code == "E401"
    assert error.message.startswith("rank 1 exited with code 7")
    assert_none_left(tmp_path)


def test_users_mistake_is_raised_once_as_itself(tmp_path, assert_none_left) -> None:
    with pytest.raises(ConfigError) as caught:
        run_local(targets.user_error, processes=2, run_dir=tmp_path)
    assert (caught.value.code, caught.value.exit_code) == ("E103", 2)
    assert str(caught.value).count("token id 300") == 1
    assert_none_left(tmp_path)


def test_result_that_cannot_travel_is_an_error(tmp_path, assert_none_left) -> None:
    error = _fail(targets.unpicklable, tmp_path, processes=1)
    assert error.message.startswith("rank 0 raised")
    assert "pickle" in error.message
    assert_none_left(tmp_path)


def test_target_must_be_importable(tmp_path) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        run_local(lambda world, context: None, processes=1, run_dir=tmp_path)


def test_taken_port_names_its_holder(tmp_path, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        error = _fail(targets.fine, tmp_path)
    assert error.code == "E403"
    assert error.message.startswith(f"port {port} is used by pid {os.getpid()} (")
    assert f"MASTER_PORT={port} in your environment: unset it" in error.message


def test_nonsense_port_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "eighty")
    error = _fail(targets.fine, tmp_path)
    assert error.code == "E403"
    assert "MASTER_PORT=eighty is not a port; use 1..65535" in error.message


def test_other_platforms_are_refused_by_name(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    error = _fail(targets.fine, tmp_path)
    assert error.code == "E405"
    assert "'win32'" in error.message
    assert "WSL" in error.message


def test_macos_spawns() -> None:
    assert local.start_method("darwin") == "spawn"
    assert local.start_method("linux") == "forkserver"


def test_launcher_does_not_import_torch() -> None:
    code = "import sys, meshwright.launching; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
