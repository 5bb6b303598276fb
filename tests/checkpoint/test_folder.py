import pytest

from meshwright.checkpoint import folder
from meshwright.checkpoint.manifest import FileRecord, Manifest, RunFacts
from meshwright.errors import CheckpointError


def make(root, step, attempt="a1", content=b"x" * 100):
    path = folder.temporary(root, step, attempt)
    path.mkdir(parents=True)
    (path / "rank00000.safetensors").write_bytes(content)
    record = FileRecord(
        "rank00000.safetensors", len(content), folder.file_checksum(path / "rank00000.safetensors")
    )
    return folder.commit(path, Manifest(RunFacts(step), 1, (record,), ()))


def test_a_commit_gives_the_name_and_the_newest_come_first(tmp_path):
    for step in (5, 100, 20):
        assert make(tmp_path, step).name == f"step-{step:08d}"
    assert [folder.step_of(path) for path in folder.list_checkpoints(tmp_path)] == [100, 20, 5]
    assert folder.read_manifest(tmp_path / "step-00000100").run.step == 100
    folder.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000100"]
    assert folder.list_checkpoints(tmp_path / "none") == []


def test_the_same_step_again_replaces_its_predecessor(tmp_path):
    make(tmp_path, 3, content=b"old")
    path = make(tmp_path, 3, content=b"new!")
    assert [item.name for item in tmp_path.iterdir()] == ["step-00000003"]
    assert folder.read_manifest(path).nbytes == 4


def test_what_a_crash_leaves_is_put_in_order(tmp_path):
    kept = make(tmp_path, 3)
    folder.temporary(tmp_path, 9, "dead").mkdir()
    (tmp_path / "step-00000003.old-a2").mkdir()  # its successor is there
    make(tmp_path, 7).rename(tmp_path / "step-00000007.old-a2")  # the crash came between two renames
    folder.clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000007"]
    assert folder.read_manifest(kept).run.step == 3
    assert folder.read_manifest(tmp_path / "step-00000007").run.step == 7


def test_later_steps_are_set_aside_and_nothing_is_lost(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step)
    assert [path.name for path in folder.set_aside(tmp_path, after=1)] == [
        "step-00000003.aside-1",
        "step-00000002.aside-1",
    ]
    make(tmp_path, 2)
    assert [path.name for path in folder.set_aside(tmp_path, after=1)] == ["step-00000002.aside-2"]
    assert [path.name for path in folder.list_checkpoints(tmp_path)] == ["step-00000001"]
    folder.clean(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_places_of_checkpoints(tmp_path):
    run = tmp_path / "run"
    path = make(run / folder.FOLDER_NAME, 4)
    assert folder.find_checkpoints(run) == folder.find_checkpoints(path.parent) == [path]
    assert folder.find_checkpoints(path) == [path]
    assert folder.find_checkpoints(tmp_path) == []


@pytest.mark.parametrize(
    ("damage", "code", "text"),
    [
        (lambda path: (path / "manifest.json").unlink(), "E503", "is no checkpoint: it has no manifest.json"),
        (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe"), "E502", "manifest.json is damaged"),
        (lambda path: (path / "rank00000.safetensors").unlink(), "E502", "rank00000.safetensors is missing"),
        (
            lambda path: (path / "rank00000.safetensors").write_bytes(b"1"),
            "E502",
            "has 1 bytes instead of 100",
        ),
    ],
)
def test_a_look_at_names_and_sizes_finds(tmp_path, damage, code, text):
    path = make(tmp_path, 1)
    damage(path)
    with pytest.raises(CheckpointError, match=text) as caught:
        folder.read_manifest(path)
    assert caught.value.code == code


def test_checksums_are_shared_by_ranks_and_name_file_and_checksum(tmp_path):
    path = make(tmp_path, 1)
    manifest = folder.read_manifest(path)
    assert folder.check_files(path, manifest) is None
    (path / "rank00000.safetensors").write_bytes(b"x" * 99 + b"y")
    assert folder.check_files(path, manifest, index=1, count=2) is None
    error = folder.check_files(path, manifest, index=0, count=2)
    assert error.code == "E502"
    assert "rank00000.safetensors is damaged: checksum" in error.message
    assert f"instead of {manifest.files[0].checksum:08x}" in error.message
    (path / "rank00000.safetensors").unlink()
    assert "cannot be read" in str(folder.check_files(path, manifest))
