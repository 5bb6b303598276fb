"""Checkpoints of tensor-parallel runs: any other layout goes on from them, to the bit."""

from __future__ import annotations

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
from tests.training.test_checkpoints import BUILT_IN, auto, losses, train

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


def test_a_run_goes_on_at_other_tensor_parallel_sizes(ranks, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks.run(train, 1, whole, [*SIZES, "save.every=end"])
    ranks.run(train, 4, parts, [*SIZES, "plan.tp=4", "plan.zero=1"], None, 3)
    ranks.run(train, 4, parts, [*SIZES, "plan.tp=2", "plan.zero=3"], auto(parts), 5)
    found = ranks.run(train, 3, parts, [*SIZES, "plan.tp=3", "plan.zero=0"], auto(parts))
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-12)
    assert "step 4, saved on 4 ranks" in found[0]["text"]
    last = stored(newest(parts))
    assert last.keys() == stored(newest(whole)).keys()
    for name, value in stored(newest(whole)).items():
        torch.testing.assert_close(last[name], value, rtol=1e-9, atol=1e-12)


MESHES = {
    "tp 1": (1, ["plan.zero=0"]),
    "zero 3": (4, ["plan.zero=3"]),
    "tp 2 zero 3": (4, ["plan.tp=2", "plan.zero=3"]),
    "tp 3": (3, ["plan.tp=3", "plan.zero=1"]),
    "tp 4 tokens": (4, ["plan.tp=4", "plan.zero=2", "plan.sequence_parallel=true"]),
    "tp 2 copies": (4, ["plan.tp=2", "plan.zero=2", "plan.hsdp=2"]),
    "tp 2 whole": (4, ["plan.tp=2", "plan.zero=2", "plan.ownership=whole"]),
    "tp 2 offload": (4, ["plan.tp=2", "plan.zero=1", "plan.offload=optimizer"]),
}


PAIRS = [("tp 4 tokens", "tp 2 zero 3"), ("tp 2 copies", "tp 3"), ("tp 3", "tp 2 whole")]


@pytest.mark.parametrize(
    ("first", "second"),
    [*PAIRS]
    + [
        pytest.param(first, second, marks=pytest.mark.parity)
        for first in MESHES
        for second in MESHES
        if first != second and (first, second) not in PAIRS
    ],
)
def test_what_another_layout_loads_and_saves_is_the_same_to_the_bit(ranks, tmp_path, first, second):
    world, overrides = MESHES[first]
    ranks.run(train, world, tmp_path / "one", [*SIZES, "train.stop_at=2 steps", *overrides])
    given = stored(newest(tmp_path / "one"))
    world, overrides = MESHES[second]
    ranks.run(resave, world, newest(tmp_path / "one"), tmp_path / "other", [*SIZES, *overrides])
    again = stored(newest(tmp_path / "other"))
    assert given.keys() == again.keys()
    assert any(name.startswith("optimizer") for name in given)
    for name, value in given.items():
        assert value.dtype == again[name].dtype
        assert torch.equal(value.view(-1).view(torch.uint8), again[name].view(-1).view(torch.uint8)), name
