"""The loss scale: how it moves, that all ranks agree on it, and what a skipped step leaves alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import NumericsError
from meshwright.models.loss import classification_loss
from meshwright.training.loss_scale import MAX_SKIPS_IN_ROW, LossScale
from meshwright.training.optimizer import OptimizerSpec
from meshwright.training.step import first_count, train_step
from tests.sharding.harness import POLICIES, make_state

SPEC = OptimizerSpec("adamw", lr=0.01)


def test_it_halves_doubles_and_counts() -> None:
    scale = LossScale(1024.0, growth_interval=3)
    seen = []
    for overflowed in (False, True, False, False, False, False, True, True):
        scale = scale.after(overflowed=overflowed)
        seen.append((scale.value, scale.skipped, scale.skipped_in_row))
    assert seen == [
        (1024, 0, 0),
        (512, 1, 1),
        (512, 1, 0),
        (512, 1, 0),
        (1024, 1, 0),
        (1024, 1, 0),
        (512, 2, 1),
        (256, 3, 2),
    ]


def test_it_is_saved_whole() -> None:
    scale = LossScale(256.0, 7, 3, 1)
    assert LossScale().with_numbers({"expected_count": 2.0, **scale.to_numbers()}) == scale
    assert scale.with_numbers({"expected_count": 2.0}) == scale, "a checkpoint of another precision"


def test_it_stays_within_its_range() -> None:
    scale = LossScale(2.0**24, growth_interval=1)
    assert scale.after(overflowed=False).value == 2.0**24


def test_too_many_skips_in_a_row_are_an_error() -> None:
    scale = LossScale()
    for _ in range(MAX_SKIPS_IN_ROW - 1):
        scale = scale.after(overflowed=True)
        scale.check(7)
    assert scale.value == 2.0
    with pytest.raises(NumericsError, match=r'E603 16 steps in a row .* up to step 7.*scale of 1\..*"bf16"'):
        scale.after(overflowed=True).check(7)


def _network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def _batch(rank: int, step: int, microbatch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + microbatch)
    labels = torch.randint(3, (3,), generator=generator)
    labels[: rank + 1] = -100
    return {"inputs": torch.randn(3, 4, generator=generator).half(), "labels": labels}


def _train(mesh: Any, policy: str, bad: tuple[int, int] | None, dtype: torch.dtype) -> dict[str, Any]:
    """`bad`: (step, rank) in which one gradient overflows."""
    state = make_state(mesh, _network(), policy, SPEC, compute_dtype=dtype, bucket_bytes=256)
    state.loss_scale = LossScale(2.0**12)
    engine = state.engine
    state.expected_count = first_count(
        engine, _batch(mesh.rank, 0, 0), loss=classification_loss, num_microbatches=2
    )
    results, scales, held = [], [], []
    for step in range(3):

        def loss(model: Any, batch: Any, step: int = step) -> tuple[Tensor, Any]:
            total, count = classification_loss(model, batch)
            if bad == (step, mesh.rank):
                total.register_hook(lambda grad: grad * torch.inf)
            return total, count

        held.append([shard.parameter.detach().clone() for shard in engine.shards])
        results.append(
            train_step(
                state,
                lambda k, step=step: _batch(mesh.rank, step, k),
                loss=loss,
                num_microbatches=2,
                lr=SPEC.lr,
                clip_norm=None,
            )
        )
        scales.append(state.loss_scale.value)
    steps = [float(state.optimizer.torch_optimizer.state[shard.parameter]["step"]) for shard in engine.shards]
    return {
        "results": results,
        "scales": scales,
        "held": held,
        "steps": steps,
        "state": (state.step, state.tokens),
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_one_rank_s_overflow_skips_the_step_on_all(ranks, policy: str) -> None:
    for run in ranks.run(_train, 3, policy, (1, 1), torch.float16):
        assert [r.applied for r in run["results"]] == [True, False, True]
        assert [r.overflowed for r in run["results"]] == [False, True, False]
        assert run["scales"] == [2.0**12, 2.0**11, 2.0**11]
        assert all(math.isfinite(r.loss) for r in run["results"])
        first, second, third = run["held"]
        assert all(torch.equal(a, b) for a, b in zip(second, third, strict=True)), (
            "a skipped step changes nothing"
        )
        assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert set(run["steps"]) == {2.0}, "a skipped step is no optimizer step"
        assert run["state"] == (3, 18), "its samples are used up"


def test_the_scale_is_divided_out_exactly(ranks) -> None:
    """In float32, where nothing over- or underflows, a power of two leaves no trace."""
    (scaled,) = ranks.run(_train_scaled, 1, 2.0**10)
    (plain,) = ranks.run(_train_scaled, 1, None)
    assert scaled[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(scaled[1], plain[1], strict=True))


def _train_scaled(mesh: Any, scale: float | None) -> tuple[list[float], list[Tensor]]:
    state = make_state(mesh, _network(), "zero1", SPEC)
    state.loss_scale = None if scale is None else LossScale(scale)
    losses = []
    for step in range(3):
        batch = {**_batch(0, step, 0)}
        batch["inputs"] = batch["inputs"].float()
        result = train_step(
            state,
            lambda _k, batch=batch: batch,
            loss=classification_loss,
            num_microbatches=1,
            lr=0.01,
            clip_norm=0.1,
        )
        losses += [result.loss, result.grad_norm]
    return losses, [shard.parameter.detach().clone() for shard in state.engine.shards]


def test_a_loss_that_is_not_finite_is_no_matter_of_scale(ranks) -> None:
    assert ranks.run(_not_finite, 2) == [(False, False, 4096.0)] * 2


def _not_finite(mesh: Any) -> tuple[bool, bool, float]:
    state = make_state(mesh, _network(), "ddp", SPEC, compute_dtype=torch.float16)
    state.loss_scale = LossScale(4096.0)

    def loss(model: Any, batch: Any) -> tuple[Tensor, Any]:
        total, count = classification_loss(model, batch)
        return total * (torch.nan if mesh.rank else 1.0), count

    result = train_step(
        state, lambda k: _batch(mesh.rank, 0, k), loss=loss, num_microbatches=1, lr=0.01, clip_norm=None
    )
    return result.applied, result.overflowed, state.loss_scale.value


def test_the_first_backward_is_about_normalised(ranks) -> None:
    counts = ranks.run(_count, 3)
    assert counts == [2.0 * (2 + 1 + 0)] * 3


def _count(mesh: Any) -> float:
    state = make_state(mesh, _network(), "zero3", SPEC, compute_dtype=torch.float16)
    return first_count(state.engine, _batch(mesh.rank, 0, 0), loss=classification_loss, num_microbatches=2)
