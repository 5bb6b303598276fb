"""Saves that fail, are cut short or are killed: the checkpoint before them stays valid."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time

import pytest
import torch

from meshwright.checkpoint import folder, writer
from meshwright.checkpoint.manifest import RunFacts
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.writer import Item, Place, Writer
from meshwright.errors import CheckpointError, SaveError
from meshwright.testing.ranks import RankError

WEIGHT = torch.arange(24.0).view(4, 6)


def items(rank=0, world=1, factor=1.0) -> list[Item]:
    flat = WEIGHT.view(-1) * factor
    first, last = rank * 24 // world, (rank + 1) * 24 // world
    found = [Item("parameter", "w", "", (4, 6), first, flat[first:last])]
    return found + [Item("optimizer", "w", "step", (), 0, torch.tensor([factor]))] * (rank == 0)


def make(root, *, rank=0, world=1, background=False, attempt="a", keep=3) -> Writer:
    return Writer(Place(root, rank, world, attempt, keep), background, [("parameter", "w", (4, 6))])


def save(root, step, **given) -> None:
    saver = make(root, **given)
    saver.save(items(factor=float(step)), RunFacts(step))
    saver.finish()


def newest_valid(root):
    """(step, weight) of the newest checkpoint that loads, and the errors of newer ones."""
    errors = []
    for path in folder.list_checkpoints(root):
        try:
            manifest = folder.read_manifest(path)
            if error := folder.check_files(path, manifest):
                raise error
            with CheckpointReader(path, manifest) as reader:
                return manifest.run.step, reader.read(manifest.model["w"]), errors
        except CheckpointError as error:
            errors.append(error)
    return -1, None, errors


@pytest.mark.parametrize("background", [False, True])
def test_what_ranks_save_is_one_tensor_and_old_ones_go(tmp_path, background):
    savers = [make(tmp_path, rank=rank, world=3, background=background, keep=2) for rank in range(3)]
    for step in (1, 2, 3):
        threads = [
            threading.Thread(target=saver.save, args=(items(rank, 3, step), RunFacts(step, tokens=7)))
            for rank, saver in enumerate(savers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    reports = [saver.finish() for saver in savers]
    assert [folder.step_of(path) for path in folder.list_checkpoints(tmp_path)] == [3, 2]
    step, weight, errors = newest_valid(tmp_path)
    assert (step, errors) == (3, [])
    assert torch.equal(weight, WEIGHT * 3)
    assert reports[0].path == tmp_path / "step-00000003"
    assert reports[0].nbytes == sum(f.stat().st_size for f in reports[0].path.glob("*.safetensors"))
    assert sorted(f.name for f in reports[0].path.iterdir()) == [
        "manifest.json",
        *(f"rank0000{rank}.safetensors" for rank in range(3)),
    ]


def test_in_the_background_training_may_change_the_values_at_once(tmp_path, monkeypatch):
    go = threading.Event()
    write = writer.write_tensors

    def late(*args, **given):
        assert go.wait(20)
        return write(*args, **given)

    monkeypatch.setattr(writer, "write_tensors", late)
    saver = make(tmp_path, background=True)
    values = items(factor=2.0)
    assert saver.save(values, RunFacts(1)) is None
    for item in values:
        item.values.zero_()
    assert saver.poll() is None
    go.set()
    report = saver.finish()
    assert (report.step, report.stall_seconds < report.seconds) == (1, True)
    assert torch.equal(newest_valid(tmp_path)[1], WEIGHT * 2)
    host = [tensor.data_ptr() for tensor in saver._host]
    saver.save(items(factor=3.0), RunFacts(2))
    assert saver.finish().step == 2
    assert [tensor.data_ptr() for tensor in saver._host] == host, "the copy's memory is used again"


def test_a_rank_that_fails_fails_the_save_on_rank_0_too(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*_args, **_given):
        raise OSError(28, "No space left on device")

    other = make(tmp_path, rank=1, world=2, background=True)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_tensors", full)
        other.save(items(1, 2), RunFacts(2))
        with pytest.raises(SaveError) as caught:
            other.finish()
    text = str(caught.value)
    assert text.startswith(
        f"E504 rank 1 cannot write the checkpoint of step 2 to {tmp_path}: No space left on device ("
    )
    assert "GiB are free there" in text
    assert f"The newest valid one is {tmp_path / 'step-00000001'}" in text
    first = make(tmp_path, world=2)
    first.save(items(0, 2), RunFacts(2))
    with pytest.raises(SaveError, match=r"E504 rank 0 .*rank 1: .*No space left"):
        first.finish()
    assert newest_valid(tmp_path)[0] == 1


def test_an_error_in_the_background_is_raised_at_the_next_look(tmp_path):
    (tmp_path / "file").write_text("")
    saver = make(tmp_path / "file", background=True)
    saver.save(items(), RunFacts(1))
    time.sleep(0.05)
    with pytest.raises(SaveError, match=r"E504 .*Not a directory.*There is no earlier one"):
        saver.save(items(), RunFacts(2))


def test_a_rank_that_never_comes_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_COMMIT_SECONDS", 0.1)
    saver = make(tmp_path, world=2)
    saver.save(items(0, 2), RunFacts(1))
    with pytest.raises(SaveError, match="rank 1 has not written its file for 0 s"):
        saver.finish()


def test_a_full_disk(tmp_path):
    """The kernel refuses to write more than 300 bytes to a file, as a full disk does in the middle of one."""
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))  # Python ignores the signal that comes with it
    try:
        with pytest.raises(SaveError, match=r"E504 .*step 2 .*File too large"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    step, weight, errors = newest_valid(tmp_path)
    assert (step, errors) == (1, [])
    assert torch.equal(weight, WEIGHT)
    save(tmp_path, 2, attempt="b")
    assert newest_valid(tmp_path)[0] == 2


def damaged_files(path):
    """Every way to damage one file of a checkpoint: cut at 50 random bytes, 50 flipped ones, missing."""
    draw = random.Random(3)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for _ in range(50):
            file.write_bytes(whole[: draw.randrange(len(whole))])
            yield file
        for _ in range(50):
            place = draw.randrange(len(whole))
            file.write_bytes(
                whole[:place] + bytes([whole[place] ^ (1 << draw.randrange(8))]) + whole[place + 1 :]
            )
            yield file
        file.unlink()
        yield file
        file.write_bytes(whole)


def test_whatever_is_damaged_is_said_and_the_previous_one_loads(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    kinds = set()
    for file in damaged_files(tmp_path / "step-00000002"):
        step, weight, errors = newest_valid(tmp_path)
        if step == 2:  # a flip in the white space of the manifest
            assert file.name == "manifest.json"
            continue
        kinds.add(file.suffix)
        assert step == 1
        assert torch.equal(weight, WEIGHT)
        missing_manifest = file.name == "manifest.json" and not file.exists()
        assert [error.code for error in errors] == ["E503" if missing_manifest else "E502"]
        assert "step-00000002" in str(errors[0])
    assert kinds == {".json", ".safetensors"}
    assert newest_valid(tmp_path)[0] == 2


def save_without_end(mesh, root, attempt):
    step = max([folder.step_of(path) for path in folder.list_checkpoints(root)], default=0)
    saver = make(root, rank=mesh.rank, world=mesh.world.size, background=True, attempt=attempt, keep=2)
    (root / f"{attempt}-{mesh.rank}.pid").write_text(str(os.getpid()))
    while True:
        step += 1
        saver.save(items(mesh.rank, mesh.world.size, float(step)), RunFacts(step))


def kill_one(root, attempt, delay, victim):
    """Kill a rank, and soon after the other one, as a launcher does."""
    files = [root / f"{attempt}-{rank}.pid" for rank in (victim, 1 - victim)]
    before = folder.list_checkpoints(root)
    while not all(file.exists() and file.read_text() for file in files):
        time.sleep(0.005)
    while folder.list_checkpoints(root) == before:
        time.sleep(0.005)
    time.sleep(delay)
    for file in files:
        os.kill(int(file.read_text()), signal.SIGKILL)
        file.unlink()
        time.sleep(0.02)


def kill_during_saves(ranks, root, *, times, seed):
    """Kill ranks that save without end, at random moments; what is newest must load, and never be older."""
    draw, newest = random.Random(seed), 0
    for number in range(times):
        folder.clean(root)
        attempt = f"a{number}"
        given = (root, attempt, draw.uniform(0.0, 0.15), draw.randrange(2))
        killer = threading.Thread(target=kill_one, args=given)
        killer.start()
        with pytest.raises(RankError, match="died with exit code -9"):
            ranks.run(save_without_end, 2, root, attempt)
        killer.join()
        folder.clean(root)
        step, weight, errors = newest_valid(root)
        assert errors == []
        assert step >= newest
        assert step <= 0 or torch.equal(weight, WEIGHT * step)
        newest = max(newest, step)
    return newest


def test_killed_at_random_moments_the_newest_one_loads(ranks, tmp_path):
    assert kill_during_saves(ranks, tmp_path, times=5, seed=1) >= 5


@pytest.mark.parity
def test_killed_at_50_random_moments_the_newest_one_loads(ranks, tmp_path):
    assert kill_during_saves(ranks, tmp_path, times=50, seed=2) >= 50
