"""Checkpoints that one layout writes and another loads: what is compared, and how."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint import folder
from meshwright.checkpoint.folder import ResumeFrom
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.writer import Place, Writer
from meshwright.comm.mesh import World
from meshwright.training.config import load_config
from meshwright.training.console import Console
from meshwright.training.loop import Run
from meshwright.training.saving import expected_tensors, items_to_save
from tests.training.test_checkpoints import BUILT_IN, losses, train

# Six heads and 50 channels: tp 4 divides neither.
SIZES = ["model.dim=24", "model.num_heads=6", "model.ffn_dim=50"]


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, but generators."""
    with CheckpointReader(path) as reader:
        tensors = [tensor for tensor in reader.manifest.tensors if tensor.kind != "generator"]
        return {f"{tensor.kind} {tensor.label}": reader.read(tensor) for tensor in tensors}


def newest(run_dir: Path) -> Path:
    return folder.list_checkpoints(run_dir / "ckpt")[0]


def resave(mesh, source, run_dir, overrides) -> None:
    """Load a checkpoint in another layout, and save it as it is."""
    config = load_config(None, [f"save.dir={run_dir}", *overrides], built_in=BUILT_IN).config
    run = Run(
        config,
        World(rank=mesh.rank, size=mesh.world.size),
        run_dir=Path(run_dir),
        console=Console(None),
        device=torch.device("cpu"),
        log=mesh.log,
    )
    found = run.checkpoints.resume(ResumeFrom(source, required=True), optimizer="adamw", numbers={})
    everyone = run.groups.everyone
    place = Place(run_dir / "ckpt", everyone.index, everyone.size, "again")
    writer = Writer(place, False, expected_tensors(run.state.engine))
    writer.save(items_to_save(run.state), found.manifest.run)
    writer.finish()


def assert_same_run(parts: Path, whole: Path) -> None:
    """Losses and the last checkpoint of a run in several layouts are those of one device."""
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-12)
    last = stored(newest(parts))
    assert last.keys() == stored(newest(whole)).keys()
    for name, value in stored(newest(whole)).items():
        torch.testing.assert_close(last[name], value, rtol=1e-9, atol=1e-12)


Meshes = Mapping[str, tuple[int, list[str]]]


def assert_same_to_the_bit(ranks, tmp_path: Path, meshes: Meshes, first: str, second: str) -> None:
    """What `first` saves, `second` loads and saves again, optimizer state too."""
    world, overrides = meshes[first]
    ranks.run(train, world, tmp_path / "one", [*SIZES, "train.stop_at=2 steps", *overrides])
    given = stored(newest(tmp_path / "one"))
    world, overrides = meshes[second]
    ranks.run(resave, world, newest(tmp_path / "one"), tmp_path / "other", [*SIZES, *overrides])
    again = stored(newest(tmp_path / "other"))
    assert given.keys() == again.keys()
    assert any(name.startswith("optimizer") for name in given)
    for name, value in given.items():
        assert value.dtype == again[name].dtype
        assert torch.equal(value.view(-1).view(torch.uint8), again[name].view(-1).view(torch.uint8)), name
