"""The engine with frozen, unused, sometimes-used parameters, buffers, and models built without memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.layout.policy import find_policy
from meshwright.models.gpt import GPT, GPTConfig
from meshwright.models.initial import draw, initialise
from meshwright.sharding.engine import ShardingEngine, sum_of_squares
from meshwright.training.optimizer import OptimizerSpec
from meshwright.training.step import train_step
from tests.sharding.harness import (
    CPU,
    POLICIES,
    accumulate,
    assemble,
    check_gradients,
    gradient_pieces,
    make_engine,
    make_state,
    parameter_pieces,
)

WIDTH = 5


def _inputs(rank: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


class Frozen(nn.Module):
    """A wholly frozen block between trained ones, a frozen bias, a frozen head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 2)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].bias.requires_grad_(False)
        self.head.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def _build_frozen() -> nn.Module:
    torch.manual_seed(1)
    return Frozen().double()


def _loss(model: Any, rank: int, microbatch: int) -> Tensor:
    return model(_inputs(rank, microbatch)).square().sum()


@pytest.mark.parametrize("policy", POLICIES)
def test_frozen_parameters(ranks, policy: str) -> None:
    gradients = check_gradients(ranks, _build_frozen, _loss, policy=policy, num_microbatches=2)
    assert set(gradients) == {"blocks.0.weight", "blocks.0.bias", "blocks.2.weight"}


def _hold_frozen(mesh) -> tuple[int, int, set[str]]:
    engine = make_engine(mesh, _build_frozen(), "zero3", alignment_numel=1)
    mesh.log.reset_counters()
    accumulate(engine, _loss, mesh.rank)
    gathered = {e.cause for e in mesh.log.events() if e.cause.startswith("gather") and "frozen" in e.cause}
    storage = engine.storage_bytes()
    return len(engine.gathered_units), storage["weight_shards"], gathered


def test_zero3_shards_frozen_parameters_too(ranks) -> None:
    numel = sum(p.numel() for p in _build_frozen().parameters())
    for weights, shards, gathered in ranks.run(_hold_frozen, 2):
        assert weights == 0
        assert 8 * numel / 2 <= shards <= 8 * (numel / 2 + 5)  # each of 5 buckets pads at most one element
        assert gathered == {"gather blocks.2 float64 frozen"}


class Routed(nn.Module):
    """Runs the blocks it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        for position in route:
            x = torch.tanh(self.blocks[position](x))
        return x


def _build_routed() -> nn.Module:
    torch.manual_seed(1)
    return Routed().double()


def _later_loss(model: Any, rank: int, microbatch: int) -> Tensor:
    """Block 1 takes part from the second micro-batch on, block 2 in the last only, block 0 not in the last."""
    return model(_inputs(rank, microbatch), [[0], [0, 1], [1, 2]][microbatch]).square().sum()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_units_used_in_some_micro_batches_only(ranks, policy: str, world: int) -> None:
    gradients = check_gradients(
        ranks, _build_routed, _later_loss, policy=policy, world=world, num_microbatches=3
    )
    assert all(bool(gradient.any()) for gradient in gradients.values())


SPEC = OptimizerSpec("adamw", lr=0.1, weight_decay=0.1)


def _stale(mesh, policy: str) -> dict[str, Any]:
    """Step 1 uses every block, step 2 leaves block 1 out of both micro-batches."""
    state = make_state(mesh, _build_routed(), policy, SPEC, bucket_bytes=200)

    def step(route: list[int]) -> float:
        return train_step(
            state,
            lambda k: _inputs(mesh.rank, k),
            loss=lambda model, x: (model(x, route).square().sum(), len(x)),
            num_microbatches=2,
            lr=SPEC.lr,
            clip_norm=None,
        ).grad_norm

    step([0, 1, 2])
    before = parameter_pieces(state.engine)
    norm = step([0, 2])
    shards = [s for s in state.engine.shards if s.name.startswith("blocks.1")]
    return {
        "before": before,
        "after": parameter_pieces(state.engine),
        "gradients": gradient_pieces(state.engine),
        "norm": norm,
        "counted": float(state.engine.norm_squared()),
        "unused": [s.parameter.grad is None for s in shards],
        "steps": [float(state.optimizer.torch_optimizer.state[s.parameter]["step"]) for s in shards],
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_a_unit_that_a_step_leaves_out_is_not_updated_by_its_old_gradient(ranks, policy: str) -> None:
    results = ranks.run(_stale, 2, policy)
    before, after = (assemble([r[moment] for r in results]) for moment in ("before", "after"))
    gradients = assemble([r["gradients"] for r in results])
    for name in after:
        unused = name.startswith("blocks.1")
        assert torch.equal(before[name], after[name]) == unused, name
        assert bool(gradients[name].any()) != unused, name
    assert any(r["unused"] for r in results)
    assert all(all(r["unused"]) for r in results)
    assert all(step == 1.0 for r in results for step in r["steps"])
    expected = sum(float(gradient.square().sum()) for gradient in gradients.values())
    assert sum(r["counted"] for r in results) == pytest.approx(expected, rel=1e-12)


CONFIG = GPTConfig(num_layers=2, dim=12, num_heads=3, ffn_dim=29, vocab_size=17, max_seq_len=5)


def _from_meta(mesh, policy: str):
    with torch.device("meta"):
        model = GPT(CONFIG)
    initial = model.initial_values()

    def initialiser(name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return draw(initial[name], seed=7, name=name, start=start, stop=stop, dtype=dtype)

    engine = ShardingEngine(
        model, policy=find_policy(policy), groups=mesh.data_groups(), device=CPU, initialiser=initialiser
    )
    assert model.head.weight is model.token_embedding.weight
    with engine.evaluation():
        logits = model(torch.arange(5).view(1, 5))
    return parameter_pieces(engine), logits


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_meta_model_starts_as_a_real_one_bit_by_bit(ranks, policy: str, world: int) -> None:
    real = GPT(CONFIG)
    initialise(real, 7)
    results = ranks.run(_from_meta, world, policy)
    held = assemble([pieces for pieces, _ in results])
    for name, parameter in real.named_parameters():
        assert torch.equal(held[name], parameter.detach().flatten()), name
    with torch.no_grad():
        expected = real(torch.arange(5).view(1, 5))
    for _, logits in results:
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-7)


def _frozen_from_meta(mesh, policy: str) -> Tensor:
    with torch.device("meta"):
        model = Frozen()

    def initialiser(name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return torch.arange(start, stop, dtype=dtype).sin()

    engine = ShardingEngine(
        model, policy=find_policy(policy), groups=mesh.data_groups(), device=CPU, initialiser=initialiser
    )
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in Frozen().parameters()]
    with engine.evaluation():
        return model(torch.ones(1, WIDTH))


@pytest.mark.parametrize("policy", POLICIES)
def test_frozen_parameters_on_the_meta_device_get_values(ranks, policy: str) -> None:
    real = Frozen()
    with torch.no_grad():
        for parameter in real.parameters():
            parameter.copy_(torch.arange(parameter.numel()).float().sin().view_as(parameter))
        expected = real(torch.ones(1, WIDTH))
    for output in ranks.run(_frozen_from_meta, 2, policy):
        torch.testing.assert_close(output, expected)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.BatchNorm1d(WIDTH) for _ in range(2)])
        self.register_buffer("angles", torch.linspace(0, 1, WIDTH, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * self.angles.cos())
        return x


def _keep_buffers(mesh, policy: str) -> dict[str, Tensor]:
    model = Buffered().double()
    engine = make_engine(mesh, model, policy)
    accumulate(engine, lambda model, *_: model(_inputs(0, 0)).square().sum(), mesh.rank)
    assert "angles" not in model.state_dict()
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("policy", ["ddp", "zero3"])
def test_buffers_stay_and_update(ranks, policy: str) -> None:
    plain = Buffered().double()
    plain(_inputs(0, 0))
    for held in ranks.run(_keep_buffers, 2, policy):
        expected = dict(plain.named_buffers())
        assert held.keys() == expected.keys()
        for name, buffer in expected.items():
            torch.testing.assert_close(held[name], buffer, rtol=1e-12, atol=1e-14)


def _meta_error(mesh) -> tuple[str, str]:
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(PlanError) as caught:
        make_engine(mesh, model, "ddp")
    return caught.value.code, caught.value.message


def test_a_buffer_without_values_is_refused(ranks) -> None:
    ((code, message),) = ranks.run(_meta_error, 1)
    assert code == "E206"
    assert "buffer 'table' of Linear is on the meta device" in message


def _one_rank_without_gradient(mesh, policy: str):
    """Rank 1's loss does not depend on the model at all: its peers must not hang, and its part counts as zero."""
    engine = make_engine(mesh, _build_routed(), policy, bucket_bytes=200)
    engine.start_step()
    engine.start_microbatch(last=True)
    if mesh.rank == 0:
        total = engine.model(_inputs(0, 0), [0, 1, 2]).square().sum()
        engine.start_backward()
        total.backward()
    engine.finish_microbatch()
    return gradient_pieces(engine), engine.used_mask().tolist()


@pytest.mark.parametrize("policy", ["ddp", "zero1", "zero2"])
def test_a_rank_without_gradient_hangs_nobody(ranks, policy: str) -> None:
    model = _build_routed()
    model(_inputs(0, 0), [0, 1, 2]).square().sum().backward()
    results = ranks.run(_one_rank_without_gradient, 2, policy)
    held = assemble([pieces for pieces, _ in results])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(held[name], parameter.grad.flatten(), rtol=1e-12, atol=0)
    assert [mask for _, mask in results] == [[1.0] * 6, [0.0] * 6]


@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 4097, 1_000_003])
def test_sum_of_squares_is_accurate_at_any_length(numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    assert float(sum_of_squares(x)) == pytest.approx(float(x.double().square().sum()), rel=1e-6)


def _engine_is_collected(mesh, policy: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = ShardingEngine(
        model, policy=find_policy(policy), groups=mesh.data_groups(), device=torch.device("cpu")
    )
    seen = weakref.ref(engine)
    del engine, model
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("policy", ["ddp", "zero2", "zero3"])
def test_an_engine_that_nobody_uses_is_collected(ranks, policy):
    """Hooks of parameters must not keep it: with it live its weights and the threads of its process groups."""
    ranks.run(_engine_is_collected, 2, policy)
