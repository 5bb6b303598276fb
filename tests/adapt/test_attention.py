"""Attention with dropout against the formula written out with the same mask, block by block or at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.adapt import attention
from meshwright.adapt.attention import attention_with_dropout, weights_shape
from meshwright.comm.rng import Draw

DRAW = Draw(key=11, first=123, drop_probability=0.3)
# Name: (shape of query, of key, of value, of mask; its kind; enable_gqa).
SHAPES = {
    "plain": ((3, 2, 5, 8), (3, 2, 7, 8), (3, 2, 7, 4), None, None, False),
    "three dims": ((6, 5, 8), (6, 7, 8), (6, 7, 4), None, None, False),
    "causal": ((3, 2, 5, 8), (3, 2, 7, 8), (3, 2, 7, 4), None, "causal", False),
    "bool": ((3, 2, 5, 8), (3, 2, 7, 8), (3, 2, 7, 4), (3, 1, 5, 7), "bool", False),
    "keys only": ((3, 2, 5, 8), (3, 2, 7, 8), (3, 2, 7, 4), (3, 1, 1, 7), "bool", False),
    "bias": ((3, 2, 5, 8), (3, 2, 7, 8), (3, 2, 7, 4), (2, 5, 7), "float", False),
    "bias of queries": ((3, 2, 5, 8), (3, 2, 7, 8), (3, 2, 7, 4), (5, 1), "float", False),
    "groups": ((3, 4, 5, 8), (3, 2, 7, 8), (3, 1, 7, 4), None, "causal", True),
    "broadcast": ((1, 2, 5, 8), (3, 1, 7, 8), (3, 2, 7, 4), (7,), "float", False),
}


def _inputs(name: str) -> tuple[list[Tensor | None], bool, bool]:
    *shapes, mask_shape, kind, grouped = SHAPES[name]
    generator = torch.Generator().manual_seed(1)
    tensors: list[Tensor | None] = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    ]
    mask = None
    if mask_shape is not None:
        values = torch.randn(mask_shape, generator=generator, dtype=torch.float64)
        mask = values > -0.5 if kind == "bool" else values.requires_grad_()
    return [*tensors, mask], kind == "causal", grouped


def _written_out(tensors: list[Tensor | None], is_causal: bool, grouped: bool, draw: Draw) -> Tensor:
    query, key, value, mask = tensors
    assert query is not None
    assert key is not None
    assert value is not None
    if grouped:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    keep = draw.keep(0, weights.numel(), weights.device).view(weights.shape)
    return (weights * keep * draw.scale) @ value


@pytest.mark.parametrize("block_numel", [1 << 20, 70, 15, 1])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_formula_in_blocks_of_any_size(
    monkeypatch: pytest.MonkeyPatch, name: str, block_numel: int
) -> None:
    monkeypatch.setattr(attention, "_BLOCK_NUMEL", block_numel)
    tensors, is_causal, grouped = _inputs(name)
    trained = [x for x in tensors if x is not None and x.requires_grad]
    out = attention_with_dropout((*tensors,), DRAW, is_causal=is_causal, scale=None, enable_gqa=grouped)
    expected = _written_out(tensors, is_causal, grouped, DRAW)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-14)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for grad, wanted in zip(
        torch.autograd.grad(out, trained, upstream),
        torch.autograd.grad(expected, trained, upstream),
        strict=True,
    ):
        torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-13)


def test_gradients_are_those_of_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BLOCK_NUMEL", 7)
    shapes = ((2, 3, 2), (2, 4, 2), (2, 4, 1), (3, 4))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def call(*tensors: Tensor) -> Tensor:
        return attention_with_dropout(tensors, DRAW, is_causal=False, scale=0.7, enable_gqa=False)

    assert torch.autograd.gradcheck(call, tuple(inputs))


def test_almost_no_dropout_is_torch_s_attention() -> None:
    never = Draw(key=1, first=0, drop_probability=1e-30)
    for name in SHAPES:
        tensors, is_causal, grouped = _inputs(name)
        if name == "groups":  # torch wants one number of heads for key and value
            tensors[2] = tensors[2].expand(3, 2, 7, 4)
        out = attention_with_dropout((*tensors,), never, is_causal=is_causal, scale=0.5, enable_gqa=grouped)
        expected = F.scaled_dot_product_attention(
            *tensors, is_causal=is_causal, scale=0.5, enable_gqa=grouped
        )
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)


def test_a_query_that_sees_no_key_gets_zeros_and_no_gradient() -> None:
    tensors, _, _ = _inputs("bool")
    tensors[3] = torch.zeros(5, 7, dtype=torch.bool)
    out = attention_with_dropout((*tensors,), DRAW, is_causal=False, scale=None, enable_gqa=False)
    grads = torch.autograd.grad(out.sum(), [x for x in tensors[:3] if x is not None])
    assert [float(x.detach().abs().max()) for x in (out, *grads)] == [0.0] * 4


def test_sixteen_bit_inputs_are_summed_in_float32() -> None:
    tensors, _, _ = _inputs("plain")
    low = [None if x is None else x.detach().bfloat16() for x in tensors]
    out = attention_with_dropout((*low,), DRAW, is_causal=True, scale=None, enable_gqa=False)
    exact = [None if x is None else x.double() for x in low]
    expected = _written_out(exact, True, False, DRAW)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-6)


def test_a_mask_and_causal_together_are_refused() -> None:
    tensors, _, _ = _inputs("bool")
    with pytest.raises(ValueError, match="attn_mask or is_causal=True, not both"):
        attention_with_dropout((*tensors,), DRAW, is_causal=True, scale=None, enable_gqa=False)


def test_weights_have_the_heads_of_the_query() -> None:
    query, key = torch.empty(3, 4, 5, 8), torch.empty(1, 2, 7, 8)
    assert weights_shape(query, key, key, enable_gqa=True) == (3, 4, 5, 7)
