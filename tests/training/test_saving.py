"""Save anywhere, load anywhere: other ranks, other policies, other buckets, the same run."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint import folder
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.errors import CheckpointError
from meshwright.training.saving import items_to_save
from tests.training.resuming import (
    GLOBAL_BATCH,
    Leg,
    build,
    facts,
    load,
    make_rank,
    make_writer,
    run_legs,
)

NUM_STEPS = 6
CHAINS = {
    "awkward-adamw": ("awkward", "adamw", [Leg(4, "zero2", 2), Leg(2, "zero3", 4), Leg(3, "zero1", 6)]),
    "gpt-adamw": ("gpt", "adamw", [Leg(4, "zero3", 1, 2), Leg(2, "ddp", 3, 2), Leg(3, "zero3", 6, 2)]),
    "gpt-muon": (
        "gpt",
        "muon",
        [Leg(4, "zero3", 2, 2, 2, "whole"), Leg(2, "ddp", 4, 2), Leg(3, "zero1", 6, 2, 1, "whole")],
    ),
    "awkward-copies": (
        "awkward",
        "adamw",
        [Leg(4, "zero3", 2, copies=2), Leg(3, "zero2", 4, ownership="whole"), Leg(2, "zero1", 6, copies=2)],
    ),
    "statistics-servers": (
        "statistics",
        "adamw",
        [Leg(2, "ddp", 2), Leg(4, "parameter_server", 4, servers=2), Leg(2, "ddp", 6)],
    ),
    "statistics-sgd": ("statistics", "sgd", [Leg(3, "ddp", 3), Leg(1, "zero1", 4), Leg(4, "zero3", 6)]),
}


def tensors_of(path) -> dict[str, torch.Tensor]:
    """Everything a checkpoint holds but generators, whole."""
    with CheckpointReader(path) as reader:
        return {
            f"{tensor.kind} {tensor.label}": reader.read(tensor)
            for tensor in reader.manifest.tensors
            if tensor.kind != "generator"
        }


def largest_difference(first, second) -> float:
    assert first.keys() == second.keys()
    worst = 0.0
    for name, value in first.items():
        scale = max(1e-3, float(value.double().abs().max())) if value.numel() else 1.0
        worst = max(worst, float((value - second[name]).double().abs().max()) / scale if value.numel() else 0)
    return worst


@pytest.mark.parametrize("chain", CHAINS)
def test_three_legs_on_other_ranks_and_policies_are_one_run(ranks, tmp_path, chain):
    model, optimizer, legs = CHAINS[chain]
    whole = [Leg(1, "ddp", NUM_STEPS, legs[0].accumulate)]
    expected = run_legs(ranks, model, optimizer, whole, tmp_path / "whole")
    result = run_legs(ranks, model, optimizer, legs, tmp_path / "legs")
    assert result["samples"] == expected["samples"]
    assert result["samples"] == [
        list(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)) for step in range(NUM_STEPS)
    ]
    for ours, theirs in zip(result["losses"], expected["losses"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)
    name = folder.step_name(NUM_STEPS)
    saved = tensors_of(tmp_path / "legs" / name)
    assert largest_difference(saved, tensors_of(tmp_path / "whole" / name)) < 1e-11
    module = build(model)
    kept = {name for name in dict(module.named_buffers()) if name in module.state_dict()}
    assert {label for label in saved if label.startswith("buffer")} == {f"buffer {name}" for name in kept}


def random_legs(seed: int) -> tuple[str, str, list[Leg]]:
    """A model, an optimizer, and three to five legs that stop at random steps."""
    draw = random.Random(seed)
    model, optimizer = (
        draw.choice(["awkward", "gpt", "llama", "statistics"]),
        draw.choice(["adamw", "sgd", "plain"]),
    )
    accumulate = draw.choice([1, 2])  # of batch statistics a part of the model
    stops = sorted(draw.sample(range(1, NUM_STEPS), draw.randrange(2, 5)))
    policies = ["ddp", "zero1", "zero2", "zero3"]
    legs = [
        Leg(draw.randrange(1, 5), draw.choice(policies), stop, accumulate) for stop in [*stops, NUM_STEPS]
    ]
    return model, optimizer, legs


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(60))
def test_random_legs_are_one_run(ranks, tmp_path, seed):
    model, optimizer, legs = random_legs(seed)
    expected = run_legs(
        ranks, model, optimizer, [Leg(1, "ddp", NUM_STEPS, legs[0].accumulate)], tmp_path / "whole"
    )
    result = run_legs(ranks, model, optimizer, legs, tmp_path / "legs")
    assert result["samples"] == expected["samples"]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    name = folder.step_name(NUM_STEPS)
    saved, wanted = (tensors_of(tmp_path / place / name) for place in ("legs", "whole"))
    assert largest_difference(saved, wanted) < 1e-10


def save_and_read_back(mesh, policy, root):
    rank = make_rank(mesh, "awkward", "adamw", policy)
    rank.step()
    writer = make_writer(rank, root)
    items = items_to_save(rank.state)
    writer.save(items, facts(rank))
    path = writer.finish().path
    return path, sum(
        item.values.numel() * item.values.element_size() for item in items if item.kind != "generator"
    )


@pytest.mark.parametrize("policy", ["ddp", "zero1", "zero3"])
def test_every_element_is_written_once_and_work_is_shared(ranks, tmp_path, policy):
    results = ranks.run(save_and_read_back, 4, policy, tmp_path)
    manifest = folder.read_manifest(results[0][0])
    stored = sum(
        tensor.numel * getattr(torch, tensor.dtype).itemsize
        for tensor in manifest.tensors
        if tensor.kind != "generator"
    )
    written = [nbytes for _, nbytes in results]
    assert sum(written) == stored
    assert max(written) < 0.45 * stored
    stored = load_file(results[0][0] / "rank00001.safetensors")
    assert {key.split("/")[0] for key in stored} <= {"parameter", "buffer", "optimizer", "generator"}


def load_only(mesh, policy, path):
    rank = make_rank(mesh, "gpt", "adamw", policy)
    read = load(rank, path)
    held = sum(
        shard.parameter.numel() * 8
        + sum(v.numel() * v.element_size() for v in rank.state.optimizer.state_of(shard).values())
        for shard in rank.state.engine.shards
    )
    return read, held


def test_a_rank_reads_the_bytes_that_it_holds_and_no_other(ranks, tmp_path):
    run_legs(ranks, "gpt", "adamw", [Leg(3, "zero1", 1)], tmp_path)
    path = tmp_path / folder.step_name(1)
    for policy in ("zero3", "zero1"):
        results = ranks.run(load_only, 4, policy, path)
        assert all(read == held for read, held in results)
        total = sum(read for read, _ in results)
        assert max(read for read, _ in results) < 0.4 * total


def freeze_and_load(mesh, path):
    rank = make_rank(mesh, "awkward", "adamw", "zero1", frozen=("head.weight", "head.bias"))
    try:
        load(rank, path)
    except CheckpointError as error:
        return str(error)
    return ""


def test_optimizer_state_is_never_dropped_in_silence(ranks, tmp_path):
    run_legs(ranks, "awkward", "adamw", [Leg(2, "zero1", 1)], tmp_path)
    path = tmp_path / folder.step_name(1)
    texts = ranks.run(freeze_and_load, 2, path)
    assert all("holds optimizer state of 2 parameters that are not trained now" in text for text in texts)
    assert all(text.startswith("E505") for text in texts)
