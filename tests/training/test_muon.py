"""Muon against singular values, against torch's, and with what it leaves to AdamW."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import ConfigErrors, PlanError
from meshwright.sharding.units import hidden_matrices
from meshwright.training.config import load_config
from meshwright.training.muon import COEFFICIENTS, NUM_ITERATIONS, Muon, orthogonalise, shape_factor
from meshwright.training.optimizer import OPTIMIZER_KINDS, OptimizerSpec, spec_of
from meshwright.training.optimizer_kinds import check_optimizer, optimizer_kind
from meshwright.training.planning import plan_of
from tests.sharding.harness import make_state

SHAPES = [(7, 7), (5, 12), (12, 5), (1, 6), (6, 1)]


def _random(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalisation_maps_singular_values(shape: tuple[int, int]) -> None:
    matrix = _random(shape)
    left, values, right = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        values = values * (a + values**2 * (b + c * values**2))
    torch.testing.assert_close(
        orthogonalise(matrix), left @ torch.diag(values) @ right, rtol=1e-12, atol=1e-12
    )


def test_singular_values_end_near_one_and_zero_stays_zero() -> None:
    values = torch.linalg.svdvals(orthogonalise(_random((64, 256))))
    assert float(values.min()) > 0.65
    assert float(values.max()) < 1.25
    assert not bool(orthogonalise(torch.zeros(3, 4)).any())


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_updates_are_those_of_torch(shape: tuple[int, int], adjust: Any) -> None:
    """torch iterates in bfloat16, whose rounding is amplified in the steep part of the polynomial."""
    ours, theirs = (nn.Parameter(_random(shape, dtype=torch.float32)) for _ in range(2))
    numbers = {"lr": 0.02, "weight_decay": 0.1}
    mine = Muon([{"params": [ours], "weight_decay": 0.1}], [], lr=0.02, momentum=0.9, adjust=adjust)
    torchs = torch.optim.Muon([theirs], **numbers, momentum=0.9, adjust_lr_fn=adjust)
    start = ours.detach().clone()
    for step in range(4):
        for parameter in (ours, theirs):
            parameter.grad = _random(shape, step + 1, torch.float32)
        mine.step()
        torchs.step()
        torch.testing.assert_close(
            mine.state[ours]["momentum_buffer"], torchs.state[theirs]["momentum_buffer"]
        )
    difference = float((ours - theirs).detach().norm() / (theirs.detach() - start).norm())
    assert difference < 0.02


def test_shape_factors() -> None:
    assert shape_factor(8, 2, "original") == 2.0
    assert shape_factor(2, 8, "original") == 1.0
    assert shape_factor(4, 100, "match_rms_adamw") == pytest.approx(2.0)


def _mixed() -> tuple[nn.Parameter, nn.Parameter, nn.Parameter, Muon]:
    matrix, vector, idle = (
        nn.Parameter(_random((3, 4))),
        nn.Parameter(_random((5,))),
        nn.Parameter(_random((2, 2))),
    )
    rest = [{"params": [vector], "weight_decay": 0.1, "lr": 0.3}]
    return matrix, vector, idle, Muon([{"params": [matrix, idle], "weight_decay": 0.0}], rest, lr=0.02)


def test_the_rest_is_adamws_and_what_has_no_gradient_is_left_out() -> None:
    matrix, vector, idle, optimizer = _mixed()
    alone = nn.Parameter(vector.detach().clone())
    adamw = torch.optim.AdamW([alone], lr=0.3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    before = idle.detach().clone()
    for step in range(3):
        matrix.grad, vector.grad, alone.grad = _random((3, 4), step), _random((5,), step), _random((5,), step)
        optimizer.step()
        adamw.step()
    assert torch.equal(vector, alone)
    assert torch.equal(idle, before)
    assert idle not in optimizer.state
    assert set(optimizer.state[matrix]) == {"momentum_buffer"}
    assert set(optimizer.state[vector]) == {"step", "exp_avg", "exp_avg_sq"}


def test_state_goes_on_after_a_load() -> None:
    matrix, vector, _, optimizer = _mixed()
    matrix.grad, vector.grad = _random((3, 4), 1), _random((5,), 1)
    optimizer.step()
    again_matrix, again_vector, _, loaded = _mixed()
    with torch.no_grad():
        again_matrix.copy_(matrix)
        again_vector.copy_(vector)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for pair in ((matrix, again_matrix), (vector, again_vector)):
        for parameter in pair:
            parameter.grad = _random(tuple(parameter.shape), 2)
    optimizer.step()
    loaded.step()
    assert torch.equal(matrix, again_matrix)
    assert torch.equal(vector, again_vector)
    assert float(loaded.state[again_vector]["step"]) == 2.0


def test_hidden_matrices_are_those_of_repeated_blocks() -> None:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(5, 4),
            "blocks": nn.ModuleList(
                [nn.Linear(4, 4), nn.Embedding(3, 4), nn.Conv1d(4, 4, 3), nn.LayerNorm(4)]
            ),
            "head": nn.Linear(4, 5),
        }
    )
    assert hidden_matrices(model) == {"blocks.0.weight"}


def test_every_optimizer_of_torch_is_in_the_table() -> None:
    classes = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    }
    assert classes <= set(OPTIMIZER_KINDS)
    assert optimizer_kind("MyOptimizer") == "whole"


def test_elementwise_updates_of_slices_are_slices_of_updates() -> None:
    """The table's claim, for every class that it calls elementwise."""
    for name in [name for name, kind in OPTIMIZER_KINDS.items() if kind == "elementwise"]:
        whole = nn.Parameter(_random((6, 4)).abs())
        parts = [nn.Parameter(part.clone()) for part in whole.detach().view(-1).split([5, 19])]
        optimizers = [getattr(torch.optim, name)(group, lr=0.1) for group in ([whole], parts)]
        for step in range(3):
            whole.grad = _random((6, 4), step)
            for part, gradient in zip(parts, whole.grad.view(-1).split([5, 19]), strict=True):
                part.grad = gradient.clone()
            for optimizer in optimizers:
                optimizer.step()
        assert torch.equal(torch.cat(list(parts)), whole.view(-1)), name


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "MyOptimizer"])
def test_what_looks_at_whole_parameters_needs_them(name: str) -> None:
    check_optimizer(name, holds_whole=True)
    with pytest.raises(PlanError) as caught:
        check_optimizer(name, holds_whole=False)
    assert caught.value.code == "E204"
    assert caught.value.message.startswith(
        f"{name} looks at whole parameters, and flat shards cut them anywhere."
    )
    assert 'Set plan.ownership="whole", or plan.zero=0.' in caught.value.message


@pytest.mark.parametrize(
    ("name", "reason"), [("LBFGS", "products over all parameters"), ("SparseAdam", "dense buckets")]
)
def test_what_cannot_run_says_why(name: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        check_optimizer(name, holds_whole=True)


def _muon(*overrides: str) -> Any:
    return load_config(None, ["train.optimizer.name=muon", "train.global_batch=12", *overrides]).config


def test_a_plan_of_flat_shards_is_refused_before_any_process_starts() -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(_muon("plan.zero=2"), world_size=2)
    assert caught.value.code == "E204"
    assert 'Set plan.ownership="whole", or plan.zero=0.' in caught.value.message
    for overrides in (
        ["plan.zero=2", "plan.ownership=whole"],
        ["plan.zero=0"],
        ["plan.zero=3", "plan.hsdp=1"],
    ):
        assert plan_of(_muon(*overrides), world_size=2).mesh.dp == 2
    assert plan_of(_muon("plan.zero=3"), world_size=1).mesh.dp == 1


def test_configuration_of_muon() -> None:
    spec = spec_of(_muon("train.optimizer.lr=0.02", "train.optimizer.adamw_lr=0.001").train.optimizer)
    assert spec == OptimizerSpec("muon", lr=0.02, momentum=0.95, adamw_lr=0.001)
    assert spec_of(load_config(None, ["train.optimizer.name=sgd"]).config.train.optimizer).momentum == 0.0
    warnings = load_config(None, ["train.optimizer.adamw_lr=0.1"]).warnings
    assert "train.optimizer.adamw_lr = 0.1 has no effect" in warnings[0]
    with pytest.raises(ConfigErrors, match="momentum"):
        _muon("train.optimizer.momentum=1.0")


def _shards_refuse(mesh: Any) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    try:
        make_state(mesh, model, "zero2", OptimizerSpec("muon"))
    except PlanError as error:
        return error.code
    return ""


def test_flat_shards_are_refused_by_the_optimizer_too(ranks: Any) -> None:
    assert "E204" in ranks.run(_shards_refuse, 2)
