"""Batch statistics over all ranks against torch's own on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.adapt import batch_norm
from meshwright.comm import ops
from meshwright.data.index_law import even_part
from meshwright.testing.ranks import local_mesh

BATCH, CHANNELS = 10, 3
INPUTS = {
    "1d": (nn.BatchNorm1d, (BATCH, CHANNELS)),
    "1d of sequences": (nn.BatchNorm1d, (BATCH, CHANNELS, 4)),
    "2d": (nn.BatchNorm2d, (BATCH, CHANNELS, 4, 2)),
    "3d": (nn.BatchNorm3d, (BATCH, CHANNELS, 2, 2, 2)),
    "sync": (nn.SyncBatchNorm, (BATCH, CHANNELS, 4, 2)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "cumulative": {"momentum": None},
    "no statistics kept": {"track_running_stats": False},
    "not affine": {"affine": False},
}


def _layer(kind: Any, options: dict[str, Any]) -> nn.Module:
    layer = kind(CHANNELS, **options).double()
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.arange(1.0, CHANNELS + 1) * (number + 0.5))
    return layer


def _data(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + 3


def _train(
    layer: nn.Module, use: Callable[[nn.Module, Tensor], Tensor], name: str, rows: range
) -> dict[str, Any]:
    """Three forwards and backwards; outputs and input gradients of `rows`, summed gradients, buffers."""
    outputs, grads = [], []
    for step in range(3):
        x = _data(INPUTS[name][1], step)[rows.start : rows.stop].requires_grad_()
        y = use(layer, x)
        (y * _data(INPUTS[name][1], 9)[:1]).square().sum().backward()
        outputs.append(y.detach())
        grads.append(x.grad)
    return {
        "outputs": outputs,
        "grads": grads,
        "parameters": [parameter.grad for parameter in layer.parameters()],
        "buffers": dict(layer.named_buffers()),
    }


def _plain(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def _checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def _on_a_rank(mesh: Any, name: str, option: str, recompute: bool) -> dict[str, Any]:
    group = mesh.group("dp")
    layer = _layer(INPUTS[name][0], OPTIONS[option])
    batch_norm.install(layer, group)
    rows = even_part(BATCH, group.size, group.index)
    result = _train(layer, _checkpointed if recompute else _plain, name, rows)
    result["calls"] = [event.cause for event in group.log.events() if event.op == "all_reduce"]
    ops.barrier(group, cause="end of test")
    return result


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("name", "option", "world"),
    [
        *((name, "default", 3) for name in INPUTS),
        *(("2d", option, world) for option in OPTIONS for world in (1, 2)),
    ],
)
def test_uneven_ranks_compute_what_one_device_does(
    ranks, name: str, option: str, world: int, recompute: bool
) -> None:
    kind = nn.BatchNorm2d if name == "sync" else INPUTS[name][0]  # torch's own runs on no CPU
    expected = _train(_layer(kind, OPTIONS[option]), _plain, name, range(BATCH))
    held = ranks.run(_on_a_rank, world, name, option, recompute)
    close = {"rtol": 1e-12, "atol": 1e-12}
    for step in range(3):
        for what in ("outputs", "grads"):
            whole = torch.cat([rank[what][step] for rank in held])
            torch.testing.assert_close(whole, expected[what][step], **close)
    for position, gradient in enumerate(expected["parameters"]):
        summed = torch.stack([rank["parameters"][position] for rank in held]).sum(0)
        torch.testing.assert_close(summed, gradient, **close)
    for rank in held:
        assert rank["buffers"].keys() == expected["buffers"].keys()
        for buffer, value in expected["buffers"].items():
            torch.testing.assert_close(rank["buffers"][buffer], value, **close)
    if world > 1:
        step = ["batch means", "batch statistics"] * (2 if recompute else 1) + ["batch statistics gradient"]
        assert held[0]["calls"] == step * 3


def _gradcheck(mesh: Any) -> bool:
    group = mesh.group("dp")

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return batch_norm._SyncedNorm.apply(x, weight, bias, 1e-5, group)[0]

    inputs = (
        _data((4, 2, 3), 0),
        torch.ones(2, dtype=torch.float64) * 1.5,
        torch.zeros(2, dtype=torch.float64),
    )
    return torch.autograd.gradcheck(call, tuple(x.requires_grad_() for x in inputs))


def test_the_gradient_is_that_of_finite_differences() -> None:
    assert _gradcheck(local_mesh())


def _frozen_and_evaluated(mesh: Any) -> tuple[Tensor, Tensor, bool]:
    group = mesh.group("dp")
    layer = _layer(nn.BatchNorm2d, {})
    batch_norm.install(layer, group)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    rows = even_part(BATCH, group.size, group.index)
    x = _data((BATCH, CHANNELS, 4, 2), 0)[rows.start : rows.stop].requires_grad_()
    layer(x).sum().backward()
    before = layer.running_mean.clone()
    evaluated = layer.eval()(x).detach()
    ops.barrier(group, cause="end of test")
    return x.grad, evaluated, torch.equal(layer.running_mean, before)


def test_frozen_weights_and_evaluation(ranks) -> None:
    layer = _layer(nn.BatchNorm2d, {})
    x = _data((BATCH, CHANNELS, 4, 2), 0).requires_grad_()
    layer(x).sum().backward()
    expected = layer.eval()(x).detach()
    held = ranks.run(_frozen_and_evaluated, 2)
    torch.testing.assert_close(torch.cat([grad for grad, *_ in held]), x.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([value for _, value, _ in held]), expected, rtol=1e-12, atol=1e-12)
    assert all(unchanged for *_, unchanged in held)


def _far_from_zero(mesh: Any, dtype: torch.dtype, mean: float) -> tuple[Tensor, int]:
    group = mesh.group("dp")
    layer = nn.BatchNorm1d(1, affine=False, eps=0.0).to(dtype)
    batch_norm.install(layer, group)
    rows = even_part(BATCH, group.size, group.index)
    x = (torch.arange(float(BATCH), dtype=dtype) + mean)[rows.start : rows.stop, None]
    y = layer(x)
    assert group.log.calls["all_reduce", "dp"] == batch_norm.num_sums(x)
    ops.barrier(group, cause="end of test")
    return y, batch_norm.num_sums(x)


@pytest.mark.parametrize(
    ("dtype", "mean", "error", "sums"),
    [(torch.float32, 1e4, 1e-3, 1), (torch.float64, 1e4, 1e-12, 2), (torch.float64, 1e7, 1e-9, 2)],
)
def test_a_large_mean_does_not_cancel_the_variance(ranks, dtype, mean, error, sums) -> None:
    held = ranks.run(_far_from_zero, 2, dtype, mean)
    y = torch.cat([values for values, _ in held])[:, 0]
    exact = (torch.arange(float(BATCH), dtype=dtype) - 4.5) / 8.25**0.5
    torch.testing.assert_close(y, exact, rtol=error, atol=error)
    assert {number for _, number in held} == {sums}


def _refused(mesh: Any) -> list[str]:
    group = mesh.group("dp")
    texts = []
    layer = nn.Sequential(nn.BatchNorm2d(CHANNELS))
    batch_norm.install(layer, group)
    with pytest.raises(ValueError, match="BatchNorm2d") as caught:
        layer(torch.ones(2, CHANNELS))
    texts.append(str(caught.value))
    alone = nn.BatchNorm1d(CHANNELS)
    batch_norm.install(alone, group)
    both = alone(torch.full((1, CHANNELS), float(mesh.rank)))  # one value a rank is enough for two ranks
    texts.append(f"{float(both[0, 0].detach()):.1f}")
    ops.barrier(group, cause="end of test")
    return texts


def test_shapes_are_checked_and_one_value_a_rank_is_enough(ranks) -> None:
    first, second = ranks.run(_refused, 2)
    assert first == ["BatchNorm2d expected 4D input (got 2D input)", "-1.0"]
    assert second[1] == "1.0"


class _OwnNorm(nn.BatchNorm1d):
    pass


def test_only_plain_classes_are_changed_and_undo_puts_them_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), _OwnNorm(2), nn.SyncBatchNorm(2), nn.LayerNorm(2))
    undo = batch_norm.install(model, local_mesh().group("dp"))
    assert ["forward" in vars(module) for module in model] == [True, False, True, False]
    assert batch_norm.find_batch_norms(model) == []
    undo()
    assert not any("forward" in vars(module) for module in model)


def test_accumulation_is_warned_of() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    (text,) = batch_norm.micro_step_warnings(model, num_microbatches=4)
    assert text.startswith(
        "W205 batch normalisation (2 modules) takes the statistics of one micro-step: with 4"
    )
    assert batch_norm.micro_step_warnings(model, num_microbatches=1) == []
    assert batch_norm.micro_step_warnings(model.eval(), num_microbatches=4) == []
    assert batch_norm.micro_step_warnings(nn.Linear(2, 2), num_microbatches=4) == []
