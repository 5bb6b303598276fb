"""Dropout by place: every function that drops, recomputation, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import get_overridable_functions, resolve_name
from torch.utils.checkpoint import checkpoint

from meshwright.adapt import random_calls
from meshwright.adapt.dropout import check_modules, native_warnings, stateless
from meshwright.comm import ops
from meshwright.comm.rng import MicroStep
from meshwright.data.index_law import BatchGeometry
from meshwright.errors import NumericsError, PlanError
from meshwright.training.randomness import StatelessDraws

BATCH = 12
X = torch.randn(BATCH, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WHOLE = MicroStep(seed=1, step=2, first_row=0, num_rows=BATCH, total_rows=BATCH)
PART = MicroStep(seed=1, step=2, first_row=4, num_rows=4, total_rows=BATCH)


def _attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.4)


class _SelfAttention(nn.Module):
    """torch's multi-head attention, which drops inside a function of Python; heads fold into the first dim."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.MultiheadAttention(6, 2, dropout=0.4, batch_first=True).double()
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(2)[..., :6].contiguous()
        return self.layer(rows, rows, rows, need_weights=self.need_weights)[0]


CALLS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F.dropout": lambda x: F.dropout(x, 0.4),
    "F.dropout in place": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.4, True),
    "torch.dropout_": lambda x: torch.dropout_(x.clone(), 0.4, True),
    "nn.Dropout": nn.Dropout(0.4),
    "nn.Dropout1d": lambda x: nn.Dropout1d(0.4)(x.flatten(2)),
    "nn.Dropout2d": nn.Dropout2d(0.4),
    "nn.Dropout3d": lambda x: nn.Dropout3d(0.4)(x[..., None]),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.4, True),
    "feature_dropout_": lambda x: torch.feature_dropout_(x.clone(), 0.4, True),
    "nn.AlphaDropout": nn.AlphaDropout(0.4),
    "nn.AlphaDropout in place": lambda x: nn.AlphaDropout(0.4, inplace=True)(x.clone()),
    "torch.alpha_dropout": lambda x: torch.alpha_dropout(x, 0.4, True),
    "torch.alpha_dropout_": lambda x: torch.alpha_dropout_(x.clone(), 0.4, True),
    "nn.FeatureAlphaDropout": nn.FeatureAlphaDropout(0.4),
    "torch.feature_alpha_dropout": lambda x: torch.feature_alpha_dropout(x, 0.4, True),
    "torch.feature_alpha_dropout_": lambda x: torch.feature_alpha_dropout_(x.clone(), 0.4, True),
    "attention": _attend,
    "nn.MultiheadAttention": _SelfAttention(need_weights=False),
    "nn.MultiheadAttention with weights": _SelfAttention(need_weights=True),
    "heads in the first dim": lambda x: F.dropout(x.flatten(0, 1), 0.4).view(x.shape),
}


def _pieces(call: Callable[[Tensor], Tensor], world: int, accumulate: int) -> Tensor:
    """What ranks and micro-steps compute of the batch, put together."""
    outputs = []
    for k in range(accumulate):
        for rank in range(world):
            geometry = BatchGeometry(BATCH, num_microbatches=accumulate, dp_size=world, dp_rank=rank)
            rows = geometry.rank_range(2, k)
            with StatelessDraws(geometry, seed=1).around(2, k):
                outputs.append(call(X[rows.start - 2 * BATCH : rows.stop - 2 * BATCH]))
    return torch.cat([output.detach() for output in outputs])


@pytest.mark.parametrize("name", CALLS)
def test_ranks_and_micro_steps_hold_slices_of_one_mask(name: str) -> None:
    whole = _pieces(CALLS[name], 1, 1)
    for world, accumulate in [(2, 1), (3, 1), (5, 1), (1, 2), (2, 3), (3, 2)]:
        pieces = _pieces(CALLS[name], world, accumulate)
        # Products of other sizes are rounded otherwise; everything else is the same bit by bit.
        rounding = 1e-13 if "ttention" in name else 0.0
        torch.testing.assert_close(pieces, whole, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("name", CALLS)
def test_every_call_draws_and_differs_from_the_last_one(name: str) -> None:
    with stateless(WHOLE):
        first, second = CALLS[name](X), CALLS[name](X)
    with stateless(WHOLE):
        again = CALLS[name](X)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def _rank_outputs(mesh: Any, accumulate: int) -> list[Tensor]:
    geometry = BatchGeometry(
        BATCH, num_microbatches=accumulate, dp_size=mesh.group("dp").size, dp_rank=mesh.rank
    )
    outputs = []
    for k in range(accumulate):
        rows = geometry.rank_range(2, k)
        part = X[rows.start - 2 * BATCH : rows.stop - 2 * BATCH]
        with StatelessDraws(geometry, seed=1).around(2, k):
            outputs.append(F.dropout(_attend(part), 0.1))
    ops.barrier(mesh.group("dp"), cause="end of test")  # none leaves while another still connects
    return outputs


@pytest.mark.parametrize(("world", "accumulate"), [(1, 2), (2, 1), (3, 2)])
def test_real_ranks_hold_slices_of_one_mask(ranks, world: int, accumulate: int) -> None:
    held = ranks.run(_rank_outputs, world, accumulate)
    pieces = [held[rank][k] for k in range(accumulate) for rank in range(world)]
    expected = _pieces(lambda x: F.dropout(_attend(x), 0.1), 1, 1)
    assert torch.equal(torch.cat(pieces) == 0, expected == 0)
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=1e-13, atol=1e-13)


def test_seeds_and_steps_give_other_masks() -> None:
    masks = []
    for seed, step in [(1, 2), (1, 3), (2, 2), (2, 1)]:
        with stateless(MicroStep(seed, step, 0, BATCH, BATCH)):
            masks.append(F.dropout(torch.ones_like(X), 0.4))
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize(
    "native", [torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout]
)
def test_values_are_those_of_torch(native: Any, p: float) -> None:
    """Of ones, torch makes two values, one for dropped and one for kept elements; so do we."""
    expected = native(torch.ones(50, 50, dtype=torch.float64), p, True).unique()
    with stateless(MicroStep(0, 0, 0, 50, 50)):
        found = native(torch.ones(50, 50, dtype=torch.float64), p, True).unique()
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)


def test_whole_channels_are_dropped() -> None:
    with stateless(WHOLE):
        dropped = (nn.Dropout2d(0.5)(torch.ones_like(X)) == 0).flatten(2)
    assert torch.equal(dropped.any(2), dropped.all(2))
    assert 0 < int(dropped.all(2).sum()) < BATCH * 3


def test_an_input_in_place_is_the_result() -> None:
    x = X.clone()
    with stateless(WHOLE):
        assert F.dropout(x, 0.4, inplace=True) is x
    assert torch.equal(x, _pieces(CALLS["F.dropout"], 1, 1))


def test_gradients_pass_through_the_mask_twice() -> None:
    x = X[:, 0, 0].clone().requires_grad_()

    def call(x: Tensor) -> Tensor:
        with stateless(WHOLE):
            return F.dropout(x, 0.4) ** 2

    assert torch.autograd.gradcheck(call, x)
    assert torch.autograd.gradgradcheck(call, x)


def test_without_training_or_probability_nothing_is_drawn() -> None:
    with stateless(WHOLE):
        state = torch.get_rng_state()
        assert F.dropout(X, 0.4, training=False) is X
        assert nn.Dropout(0.0)(X) is X
        assert torch.alpha_dropout(X, 0.4, False) is X
        expected = F.scaled_dot_product_attention(X, X, X, dropout_p=0.0)
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(expected, F.scaled_dot_product_attention(X, X, X))


def test_torch_s_own_checks_stay() -> None:
    with stateless(WHOLE):
        with pytest.raises(ValueError, match=r"between 0 and 1, but got 1\.5"):
            F.dropout(X, 1.5)
        with pytest.raises(RuntimeError, match="dropout1d: Expected 2D or 3D input"):
            F.dropout1d(X, 0.5)


def test_torch_s_generator_is_put_back() -> None:
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="between 0 and 1"), stateless(WHOLE):
        F.dropout(F.dropout(X, 0.4), 2.0)
    assert torch.equal(torch.get_rng_state(), state)


# Recomputation.


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inner = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.4), nn.Linear(5, 5)).double()

    def forward(self, x: Tensor) -> Tensor:
        return _attend(F.dropout(self.inner(x), 0.2))


def _plain(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return block(x)


def _nested(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(lambda y: checkpoint(block, y, use_reentrant=False), x, use_reentrant=False)


WAYS: Mapping[str, Callable[..., Tensor]] = {
    "checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "nested": _nested,
}


def _gradients(
    way: Callable[..., Tensor], backward: Callable[[Tensor, list[Tensor]], list[Tensor]]
) -> list[Tensor]:
    """Two uses of one block, so that recomputation happens in another order than the forward."""
    block, x = _Block(), X.clone().requires_grad_()
    with stateless(WHOLE):
        y = way(block, way(block, x))
        return backward(y.square().sum(), [x, *block.parameters()])


def _by_backward(loss: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    loss.backward()
    return [tensor.grad for tensor in tensors]


def _by_function(loss: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    torch.autograd.backward(loss)
    return [tensor.grad for tensor in tensors]


def _by_grad(loss: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, tensors))


@pytest.mark.parametrize("backward", [_by_backward, _by_function, _by_grad])
@pytest.mark.parametrize("way", WAYS)
def test_recomputation_has_the_masks_of_the_forward(way: str, backward: Any) -> None:
    if way == "reentrant" and backward is _by_grad:
        pytest.skip("torch refuses autograd.grad through a reentrant checkpoint")
    expected = _gradients(_plain, _by_backward)
    for grad, wanted in zip(_gradients(WAYS[way], backward), expected, strict=True):
        assert torch.equal(grad, wanted)


def test_recomputation_that_does_not_keep_the_generator_is_refused() -> None:
    def forgetful(block: _Block, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)

    with pytest.raises(
        NumericsError, match=r"E209 dropout\(p=0\.4\) in _Block > Sequential > Dropout.*preserve_rng_state"
    ):
        _gradients(forgetful, _by_backward)


# What is refused.


class _Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x.flatten()[:-1], 0.4)


def test_a_tensor_that_is_not_cut_like_the_batch_is_refused_on_several_ranks() -> None:
    with (
        stateless(PART),
        pytest.raises(
            PlanError,
            match=r"E208 dropout\(p=0\.4\) in _Flat: .* shape \(239,\) .* this rank's 4 of 12 samples",
        ),
    ):
        _Flat()(X[:4])
    with stateless(WHOLE):
        assert 0 < int((_Flat()(X) == 0).sum()) < 719


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("rand_like", torch.rand_like),
        ("bernoulli_", lambda x: torch.empty_like(x).bernoulli_(0.5)),
        ("gumbel_softmax", F.gumbel_softmax),
        ("rrelu", lambda x: F.rrelu(x, training=True)),
        ("lstm", lambda x: nn.LSTM(5, 5, 2, dropout=0.5, batch_first=True).double()(x[:, 0])),
        ("rand_like", lambda x: torch.ops.aten.rand_like(x)),
        ("native_dropout.default", lambda x: torch.ops.aten.native_dropout.default(x, 0.5, True)),
        ("native_dropout", lambda x: torch.native_dropout(x, 0.5, True)),
    ],
)
def test_other_random_functions_are_refused_on_several_ranks_only(
    name: str, call: Callable[[Tensor], Any]
) -> None:
    with (
        stateless(PART),
        pytest.raises(PlanError, match=rf"E208 {name} in (the loss|LSTM) draws random numbers"),
    ):
        call(X[:4])
    with stateless(WHOLE):
        call(X)


def test_random_functions_that_are_alike_on_all_ranks_pass() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for place in (PART, WHOLE):
        with stateless(place):
            torch.rand(4, generator=generator)
            nn.LSTM(5, 5, 2, batch_first=True).double()(X[:4, 0])
            F.rrelu(X)
            drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_sequence_first_layers_are_refused_on_several_ranks(kind: Any) -> None:
    model = nn.Sequential(kind(4, 2, 8, dropout=0.1))
    with pytest.raises(PlanError, match=r"E208 Transformer.*Layer '0' has batch_first=False .* 2 ranks cut"):
        check_modules(model, num_ranks=2)
    check_modules(model, num_ranks=1)
    check_modules(kind(4, 2, 8, dropout=0.0), num_ranks=2)
    check_modules(kind(4, 2, 8, dropout=0.1, batch_first=True), num_ranks=2)


def test_native_dropout_is_warned_of_on_several_ranks() -> None:
    (text,) = native_warnings(_Block(), "native", num_ranks=2)
    assert text.startswith('W206 train.dropout = "native" on 2 ranks: ')
    assert native_warnings(_Block(), "native", num_ranks=1) == []
    assert native_warnings(_Block(), "stateless", num_ranks=2) == []


# No function of torch is missed.


def _random_operators() -> set[str]:
    """Names of torch's operators that draw from a generator, by torch's own tag."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")}
    packets = [getattr(torch.ops.aten, name.removeprefix("aten::"), None) for name in names]
    return {
        packet._qualified_op_name.removeprefix("aten::")
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket) and random_calls.is_random(packet)
    }


# Draw although torch does not tag their operators, or in Python.
UNTAGGED = {
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "rrelu",
    "rrelu_",
    "gumbel_softmax",
    "multi_head_attention_forward",
}
UNTAGGED_WORDS = ("dropout", "scaled_dot_product")


def _draws(function: Any, operators: set[str]) -> bool:
    name = getattr(function, "__name__", "")
    code = getattr(function, "__code__", None)
    called = set(code.co_names) if code else set()
    return bool(({name} | called) & (operators | UNTAGGED)) or any(word in name for word in UNTAGGED_WORDS)


def test_every_overridable_function_that_draws_is_in_a_table() -> None:
    operators = _random_operators()
    assert {"bernoulli_", "native_dropout", "randperm"} <= operators
    missed = {
        resolve_name(function)
        for functions in get_overridable_functions().values()
        for function in functions
        if _draws(function, operators) and function not in random_calls.HANDLERS
    }
    assert missed <= {"torch.miopen_rnn"}  # the kernel behind torch.lstm on AMD; nobody calls it by its name
