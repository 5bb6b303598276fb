"""Weights out and in: safetensors as the hub has them, torch's distributed checkpoints, and back."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file, save_file

from meshwright.checkpoint import folder
from meshwright.checkpoint.dcp import METADATA_NAME, export_dcp, import_dcp
from meshwright.checkpoint.exporting import export_safetensors
from meshwright.checkpoint.importing import import_safetensors
from meshwright.checkpoint.manifest import RunFacts
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.writer import Item, Place, Writer
from meshwright.errors import CheckpointError

TENSORS = {
    "layers.0.weight": torch.randn(7, 5, generator=torch.Generator().manual_seed(1)),
    "layers.0.bias": torch.arange(5.0),
    "half": torch.arange(6.0).to(torch.bfloat16).view(2, 3),
    "scalar": torch.tensor(2.5),
    "counts": torch.tensor([1, 2, 3]),
}


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of two ranks with moments for the first tensor."""
    items: list[list[Item]] = [[], []]
    for name, tensor in TENSORS.items():
        kind = "parameter" if tensor.is_floating_point() else "buffer"
        flat, middle = tensor.reshape(-1), tensor.numel() // 2
        for rank, (first, last) in enumerate([(0, middle), (middle, tensor.numel())]):
            if first < last:
                items[rank].append(Item(kind, name, "", tuple(tensor.shape), first, flat[first:last]))
    weight = TENSORS["layers.0.weight"]
    items[0].append(Item("optimizer", "layers.0.weight", "exp_avg", (7, 5), 0, weight.view(-1) * 3))
    items[0].append(Item("optimizer", "layers.0.weight", "step", (), 0, torch.tensor([4.0])))
    items[0].append(Item("generator", "0 cpu", "", (3,), 0, torch.zeros(3, dtype=torch.uint8)))
    run = RunFacts(step=4, tokens=9, samples=16, optimizer="adamw")
    for rank in (1, 0):
        writer = Writer(Place(tmp_path / "ckpt", rank, 2, "a"), rank == 1, [])
        writer.save(items[rank], run)
        report = writer.finish()
    return report.path


def weights_of(path) -> dict[str, torch.Tensor]:
    with CheckpointReader(path) as reader:
        return {name: reader.read(tensor) for name, tensor in reader.manifest.model.items()}


def same(first, second) -> bool:
    assert first.keys() == second.keys()
    return all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def test_safetensors_out_and_in(saved, tmp_path):
    with CheckpointReader(saved) as reader:
        done = export_safetensors(reader, tmp_path / "out")
    assert done.files == ("model.safetensors",)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), TENSORS)
    manifest = import_safetensors(tmp_path / "out", tmp_path / "back")
    assert (manifest.run.step, manifest.optimizer) == (0, {})
    assert same(weights_of(tmp_path / "back"), TENSORS)
    assert folder.check_files(tmp_path / "back", folder.read_manifest(tmp_path / "back")) is None
    kinds = {tensor.name: tensor.kind for tensor in manifest.tensors}
    assert (kinds["scalar"], kinds["counts"]) == ("parameter", "buffer")


def test_a_large_model_is_several_files_and_an_index(saved, tmp_path):
    with CheckpointReader(saved) as reader:
        done = export_safetensors(reader, tmp_path / "out", dtype=torch.float16, max_file_bytes=75)
    assert done.files == tuple(f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": done.nbytes}
    merged = {}
    for name, file in index["weight_map"].items():
        merged[name] = load_file(tmp_path / "out" / file)[name]
    expected = {k: v.half() if v.is_floating_point() else v for k, v in TENSORS.items()}
    assert same(merged, expected)
    import_safetensors(tmp_path / "out", tmp_path / "back")
    assert same(weights_of(tmp_path / "back"), expected)


def test_torch_reads_our_export_and_we_read_torchs(saved, tmp_path):
    with CheckpointReader(saved) as reader:
        done = export_dcp(reader, tmp_path / "dcp")
        assert METADATA_NAME in done.files
    wanted = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    wanted["optim.state.layers.0.weight.exp_avg"] = torch.zeros(7, 5)
    wanted["train.step"] = torch.zeros((), dtype=torch.int64)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        torch_dcp.load(wanted, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(wanted["model.layers.0.weight"], TENSORS["layers.0.weight"])
    assert torch.equal(wanted["optim.state.layers.0.weight.exp_avg"], TENSORS["layers.0.weight"] * 3)
    assert int(wanted["train.step"]) == 4
    whole = import_dcp(tmp_path / "dcp", tmp_path / "whole", optimizer="adamw")
    assert (whole.run.step, whole.run.samples, whole.run.optimizer) == (4, 16, "adamw")
    assert [tensor.slot for tensor in whole.optimizer["layers.0.weight"]] == ["exp_avg", "step"]
    assert same(weights_of(tmp_path / "whole"), TENSORS)
    weights = import_dcp(tmp_path / "dcp", tmp_path / "weights")
    assert (weights.run.step, weights.optimizer) == (0, {})


def test_a_state_dict_that_torch_saved_with_objects_in_it(tmp_path):
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        torch_dcp.save({**TENSORS, "note": {"any": "object"}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_dcp(tmp_path / "dcp", tmp_path / "back")
    assert same(weights_of(tmp_path / "back"), TENSORS)


class Crafted:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_crafted_pickle_is_refused_and_runs_nothing(tmp_path):
    source = tmp_path / "dcp"
    source.mkdir()
    (source / METADATA_NAME).write_bytes(pickle.dumps(Crafted(str(tmp_path / "pwned"))))
    with pytest.raises(CheckpointError, match=r"E502 .*it names _?io\.open, which no such file needs"):
        import_dcp(source, tmp_path / "out")
    assert not (tmp_path / "pwned").exists()
    (source / METADATA_NAME).write_bytes(pickle.dumps([1]))
    with pytest.raises(CheckpointError, match=r"E502 .*holds a list, not a Metadata"):
        import_dcp(source, tmp_path / "out")
    (source / METADATA_NAME).write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match=r"E502 .*cannot be read as a torch distributed checkpoint"):
        import_dcp(source, tmp_path / "out")


def test_nothing_is_overwritten_and_nothing_is_guessed(saved, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").write_text("")
    with CheckpointReader(saved) as reader:
        for export in (export_safetensors, export_dcp):
            with pytest.raises(
                CheckpointError, match=r"E504 .*used' is not empty, and nothing is overwritten"
            ):
                export(reader, tmp_path / "used")
        with pytest.raises(CheckpointError, match=r"E504 cannot write to .*: "):
            export_safetensors(reader, tmp_path / "used" / "x")
    with pytest.raises(CheckpointError, match=r"E503 .*has no safetensors files"):
        import_safetensors(tmp_path / "used", tmp_path / "out")
    (tmp_path / "used" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"E502 .*index\.json is damaged"):
        import_safetensors(tmp_path / "used", tmp_path / "out")
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_one_file_is_enough(tmp_path):
    save_file(TENSORS, tmp_path / "w.safetensors")
    import_safetensors(tmp_path / "w.safetensors", tmp_path / "back")
    assert same(weights_of(tmp_path / "back"), TENSORS)
