"""Whole runs in 16 bits: they learn as in float32, say what they hold, skip what overflows, and go on after a stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.training import loop
from meshwright.training.loss_scale import LossScale
from tests.training.test_checkpoints import auto, losses, train

STEPS = ["train.stop_at=20 steps", "train.eval_every=end", "train.eval_samples=16"]


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def run(ranks: Any, world: int, run_dir: Path, *overrides: str) -> list[dict[str, Any]]:
    return ranks.run(train, world, run_dir, [*STEPS, *overrides], None, None, "never")


def test_bf16_learns_as_float32_does(ranks, tmp_path: Path) -> None:
    full, low, host = tmp_path / "full", tmp_path / "low", tmp_path / "host"
    expected = run(ranks, 1, full, "plan.precision=fp32")[0]["result"]
    got = run(ranks, 2, low, "plan.precision=bf16", "plan.zero=3")
    run(ranks, 3, host, "plan.precision=bf16", "plan.zero=1", "plan.offload=optimizer")
    assert losses(full)[-1] < losses(full)[0] - 1
    for other in (low, host):
        assert losses(other) == pytest.approx(losses(full), rel=2e-2)
    assert got[0]["result"]["eval_loss"] == pytest.approx(expected["eval_loss"], rel=2e-2)
    assert {record["loss_scale"] for record in records(low)} == {None}
    memory = got[0]["result"]["memory_bytes"]
    assert memory["predicted"]["weights"] > 0
    state = ("weights", "gradients", "optimizer", "gathered", "host")
    assert all(memory["predicted"][name] == memory["measured"][name] for name in state)
    assert memory["measured"]["activations"] == pytest.approx(memory["predicted"]["activations"], rel=0.05)


def test_offload_changes_no_loss_and_is_listed(ranks, tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    run(ranks, 2, there, "plan.precision=bf16", "plan.zero=2")
    first = run(ranks, 2, here, "plan.precision=bf16", "plan.zero=2", "plan.offload=optimizer")[0]
    text, result = first["text"], first["result"]
    assert losses(there) == losses(here)
    assert "W208 plan.offload" in text
    assert "optimizer in host memory" in text
    memory = result["memory_bytes"]
    assert memory["predicted"]["host"] == memory["measured"]["host"] > 0
    assert memory["measured"]["optimizer"] == 0
    assert " · host " in text


def _train_from(mesh: Any, first: float, *arguments: Any) -> dict[str, Any]:
    given = loop.LossScale
    loop.LossScale = lambda: LossScale(first)  # type: ignore[misc, assignment]
    try:
        return train(mesh, *arguments)
    finally:
        loop.LossScale = given  # type: ignore[misc]


def test_fp16_skips_what_overflows_and_goes_on(ranks, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    overrides = ["plan.precision=fp16", "plan.zero=2"]
    text = ranks.run(_train_from, 2, 2.0**20, whole, overrides)[0]["text"]
    seen = records(whole)
    skipped = [record for record in seen if record["grad_norm"] is None]
    assert 0 < len(skipped) < len(seen) - 2
    assert text.count("skip   step") == len(skipped)
    assert "no update; loss scale 1,048,576 → 524,288 (1 skipped so far)" in text
    assert "W207 plan.precision" in text
    assert seen[-1]["loss_scale"] == 2.0**20 / 2 ** len(skipped)
    # The scale is part of the checkpoint: a run that begins anew from its own would skip again.
    ranks.run(_train_from, 3, 2.0**20, parts, overrides, None, 6)
    text = ranks.run(train, 2, parts, ["plan.precision=fp16", "plan.zero=3"], auto(parts))[0]["text"]
    assert "skip   step" not in text
    assert [record["loss_scale"] for record in records(parts)] == [record["loss_scale"] for record in seen]
    assert losses(parts) == pytest.approx(losses(whole), rel=2e-3)
