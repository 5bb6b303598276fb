"""Attention found in models as they are: the same gradients to the bit, and no score matrix waits for backward."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.layout.recompute import parse_recompute
from meshwright.nested import storage_key
from meshwright.recompute.holders import StayingWeights
from meshwright.recompute.install import install
from meshwright.recompute.live_bytes import saved_bytes
from meshwright.recompute.regions import Region

BATCH, SEQ, DIM, HEADS = 2, 48, 16, 4


class Written(nn.Module):
    """Attention written out, as in papers; `inplace` masks and scales in place."""

    def __init__(self, *, inplace: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.Dropout(0.2)
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        future = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
        scores = q @ k.transpose(-1, -2)
        if self.inplace:
            scores /= math.sqrt(DIM // HEADS)
            scores.masked_fill_(future, float("-inf"))
        else:
            scores = (scores / math.sqrt(DIM // HEADS)).masked_fill(future, float("-inf"))
        weights = self.dropout(F.softmax(scores, dim=-1))
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Fused(Written):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        dropout = 0.2 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention, self.linear = nn.LayerNorm(DIM), attention, nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + torch.relu(self.linear(x))


def make(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    makers = {
        "written": Written,
        "in place": lambda: Written(inplace=True),
        "fused, no kernel": Fused,
        "fused": lambda: Fused().eval(),
    }
    return nn.Sequential(*(Block(makers[kind]()) for _ in range(3))).double()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    x.grad = None
    model(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("kind", "num_regions"), [("written", 3), ("in place", 3), ("fused, no kernel", 3), ("fused", 0)]
)
def test_gradients_are_the_same_and_attention_runs_again(kind: str, num_regions: int, monkeypatch) -> None:
    model = make(kind)
    x = torch.randn(BATCH, SEQ, DIM, dtype=torch.float64, requires_grad=True)
    expected = gradients(model, x)
    ran = []
    again = Region._again
    monkeypatch.setattr(Region, "_again", lambda region: (ran.append(1), again(region)))
    install(model, parse_recompute("selective"))
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
    assert len(ran) == num_regions


def kept(kind: str, word: str) -> int:
    """Bytes that wait for the backward."""
    model = make(kind)
    install(model, parse_recompute(word))
    x = torch.randn(BATCH, SEQ, DIM, dtype=torch.float64, requires_grad=True)
    return saved_bytes(lambda: model(x).sum(), [x, *model.parameters()])


@pytest.mark.parametrize("kind", ["written", "fused, no kernel"])
def test_no_score_matrix_waits_for_backward(kind: str) -> None:
    scores, masks = BATCH * HEADS * SEQ * SEQ * 8, SEQ * SEQ
    # In each of the 3 blocks: weights, dropped weights and the mask of dropout at least.
    assert kept(kind, "none") - kept(kind, "selective") >= 3 * 2 * scores
    assert kept(kind, "selective") < kept("fused", "none") + 3 * 2 * masks
    assert kept("fused", "selective") == kept("fused", "none")


@pytest.mark.parametrize("kind", ["written", "fused, no kernel"])
def test_inside_of_a_checkpoint_that_a_module_makes_nothing_is_watched(kind: str, monkeypatch) -> None:
    model = make(kind)
    for block in model:
        attention = block.attention.forward
        block.attention.forward = partial(checkpoint, attention, use_reentrant=False)
    x = torch.randn(BATCH, SEQ, DIM, dtype=torch.float64, requires_grad=True)
    expected = gradients(model, x)
    install(model, parse_recompute("selective"))
    monkeypatch.setattr(Region, "_again", lambda _: pytest.fail("attention inside of a checkpoint was held"))
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))


def test_a_product_with_a_weight_is_no_attention() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(BATCH, SEQ, SEQ))

        def forward(self, x: Tensor) -> Tensor:
            return F.softmax(self.weight.transpose(1, 2) @ x, dim=-1)

    model = nn.Sequential(Mixer(), Mixer())
    x = torch.randn(BATCH, SEQ, DIM, requires_grad=True)
    expected = gradients(model, x)
    install(model, parse_recompute("selective"))
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))


class Biased(nn.Module):
    """Attention whose scores have a learned bias, as of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HEADS, SEQ, SEQ, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        weights = F.softmax(q @ q.transpose(-1, -2) + self.bias, dim=-1)
        return (weights @ q).transpose(1, 2).flatten(2)


class MovingWeights(StayingWeights):
    """Weights that lie elsewhere in backward, as those of zero3; where they were others have written."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = model

    def pack(self, tensor: Tensor) -> object:
        for name, parameter in self.model.named_parameters():
            if storage_key(parameter) == storage_key(tensor):
                return name, tensor.size(), tensor.stride(), tensor.storage_offset()
        return super().pack(tensor)

    def unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, tuple):
            return super().unpack(packed)
        name, *place = packed
        return self.model.get_parameter(name).data.as_strided(*place)

    def move(self) -> None:
        for parameter in self.model.parameters():
            old = parameter.data
            parameter.data = old.clone()
            old.fill_(float("nan"))


@pytest.mark.parametrize("word", ["selective", "full"])
def test_weights_that_move_are_read_where_they_are_in_backward(word: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Biased(), Biased())
    x = torch.randn(BATCH, SEQ, DIM, dtype=torch.float64, requires_grad=True)
    expected = gradients(model, x)
    weights = MovingWeights(model)
    install(model, parse_recompute(word), weights=weights)
    model.zero_grad()
    x.grad = None
    loss = model(x).square().sum()
    weights.move()
    loss.backward()
    got = [x.grad, *(p.grad for p in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
