"""Weights from safetensors: exact, only the rows that are needed, and other models' files named in patterns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from meshwright.errors import ConfigError
from meshwright.layout.policy import find_policy
from meshwright.sharding.engine import ShardingEngine
from meshwright.training import pretrained
from meshwright.training.hf import HfBuild
from tests.training.hf_models import FAMILIES, SIZES, save


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder of weights for each family."""
    made = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in made.items():
        save(family, folder)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_all_values_are_those_of_from_pretrained(family: str, folders) -> None:
    build = HfBuild(str(folders[family]), init="pretrained")
    expected = build.source().model_class.from_pretrained(folders[family])
    model = build()
    assert type(model) is type(expected)
    values = model.state_dict()
    assert list(values) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        assert torch.equal(values[name], value), name
    for (name, buffer), (_, wanted) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(buffer, wanted), name
    assert model.config.to_dict() == expected.config.to_dict()


def test_sharded_files_and_files_of_the_body_alone(tmp_path) -> None:
    model = save("gpt2", tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    model.transformer.save_pretrained(tmp_path / "body")
    (tmp_path / "body" / "config.json").write_text((tmp_path / "sharded" / "config.json").read_text())
    for folder in ("sharded", "body"):
        loaded = HfBuild(str(tmp_path / folder), init="pretrained")()
        for name, value in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value), (folder, name)
    # Masks that old GPT-2 files carry are no weights.
    weights = load_file(tmp_path / "body" / "model.safetensors")
    save_file(weights | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "body" / "model.safetensors")
    HfBuild(str(tmp_path / "body"), init="pretrained")()


class Counting:
    """`safe_open` that notes how many elements of each tensor are read."""

    def __init__(self) -> None:
        self.numel: dict[str, int] = {}

    def __call__(self, path: Any, framework: str) -> Any:
        return _CountingFile(self, safe_open(path, framework=framework))


class _CountingFile:
    def __init__(self, counting: Counting, file: Any) -> None:
        self.counting, self.file = counting, file

    def __enter__(self) -> _CountingFile:
        self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def keys(self) -> Any:
        return self.file.keys()

    def get_slice(self, name: str) -> Any:
        return _CountingSlice(self.counting, name, self.file.get_slice(name))


class _CountingSlice:
    def __init__(self, counting: Counting, name: str, piece: Any) -> None:
        self.counting, self.name, self.piece = counting, name, piece

    def get_shape(self) -> list[int]:
        return self.piece.get_shape()

    def __getitem__(self, rows: slice) -> torch.Tensor:
        values = self.piece[rows]
        self.counting.numel[self.name] = self.counting.numel.get(self.name, 0) + values.numel()
        return values


def _shards(mesh, folder: str, policy: str) -> Any:
    counting = Counting()
    pretrained.safe_open, original = counting, pretrained.safe_open
    try:
        build = HfBuild(folder, init="pretrained")
        model = build.skeleton().double()
        engine = ShardingEngine(
            model,
            policy=find_policy(policy, bucket_bytes=4096),
            groups=mesh.data_groups(),
            device=torch.device("cpu"),
            initialiser=build.first_values(model, 0),
        )
    finally:
        pretrained.safe_open = original
    values = [(s.name, s.piece.start, s.parameter.detach().flatten().clone()) for s in engine.shards]
    return values, counting.numel, sum(value.numel() for _, _, value in values)


@pytest.mark.parametrize("policy", ["zero1", "zero3"])
def test_a_rank_reads_what_it_holds(policy: str, folders, ranks, tmp_path) -> None:
    model = HfBuild(str(folders["llama"]), init="pretrained")()
    parameters = {name: p.detach().double().flatten() for name, p in model.named_parameters()}
    total = sum(p.numel() for p in parameters.values())
    covered = {name: torch.zeros(p.numel()) for name, p in parameters.items()}
    again = {name: torch.empty(p.shape) for name, p in model.named_parameters()}
    for values, read, held in ranks.run(_shards, 2, str(folders["llama"]), policy, timeout=300.0):
        for name, start, value in values:
            assert torch.equal(value, parameters[name][start : start + len(value)]), name
            covered[name][start : start + len(value)] += 1
            again[name].view(-1)[start : start + len(value)] = value
        if policy == "zero3":
            # A cut inside a row reads that row on both sides: at most one row at each end of a piece.
            slack = sum(2 * 44 for _ in values)
            assert held <= sum(read.values()) <= held + slack < 0.6 * total
        else:
            assert sum(read.values()) == total
    assert all(bool((count == 1).all()) for count in covered.values())
    # Put together again, the pieces make the same file, byte for byte.
    save_file(again, tmp_path / "again.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "again.safetensors").read_bytes() == (
        folders["llama"] / "model.safetensors"
    ).read_bytes()


def _error(folder: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        HfBuild(str(folder), **({"init": "pretrained"} | options))()
    assert caught.value.code == "E121"
    return caught.value.message


def test_weights_of_another_model_are_named_in_patterns(tmp_path, folders) -> None:
    text = _error(folders["llama"], sizes={"ffn_dim": 40})
    assert "6 of another shape: model.layers.*.mlp." in text
    assert "model.layers.*.mlp.down_proj.weight [32, 44], model [32, 40]" in text
    assert "model.layers.*.mlp.{gate_proj,up_proj}.weight [44, 32], model [40, 32]" in text
    text = _error(folders["llama"], sizes={"num_layers": 1})
    assert "9 without a place in the model: model.layers.*.{" in text
    assert "down_proj" in text
    weights = load_file(folders["llama"] / "model.safetensors")
    for layer in range(2):
        del weights[f"model.layers.{layer}.mlp.up_proj.weight"]
    (tmp_path / "config.json").write_text((folders["llama"] / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors")
    assert "2 missing: model.layers.*.mlp.up_proj.weight. Set" in _error(tmp_path)


def test_a_new_head_must_be_asked_for(folders) -> None:
    options = {"task": "sequence_classification"}
    text = _error(folders["bert"], **options)
    assert "missing: " in text
    # A masked model has no pooler: it belongs to the body, so it is not drawn.
    assert "bert.pooler.dense.{weight,bias}" in text
    folder = folders["gpt2"]
    text = _error(folder, **options)
    assert text.endswith('1 missing: score.weight. Set model.init = "pretrained_body" to draw a new head.')
    model = HfBuild(str(folder), init="pretrained_body", task="sequence_classification")()
    assert torch.equal(
        model.transformer.wte.weight, load_file(folder / "model.safetensors")["transformer.wte.weight"]
    )
    assert 0 < float(model.score.weight.detach().std()) < 0.05


def test_folders_without_usable_weights_are_named(tmp_path, folders) -> None:
    config = (folders["llama"] / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "pytorch_model.bin").touch()
    assert "pytorch_model.bin is pickled and never loaded" in _error(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "lost.safetensors"}})
    )
    assert "names lost.safetensors, which is not there" in _error(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0nonsense")
    assert f"{tmp_path}/model.safetensors: " in _error(tmp_path)
    assert "is the name of a model type and has no weights" in _error(Path("llama"), sizes=SIZES["llama"])
