"""What layers keep for backward, measured, is what formulas say: the paper's layer in 16 bits, op by op."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from meshwright.adapt.dropout import stateless
from meshwright.comm.rng import MicroStep
from meshwright.layout.recompute import parse_recompute
from meshwright.nested import storage_key
from meshwright.presets import find_model
from meshwright.recompute.install import install
from meshwright.recompute.live_bytes import saved_bytes
from meshwright.simulation.memory import layer_activation_bytes

BATCH, SEQ, DIM, HEADS, DROP = 2, 48, 64, 4, 0.1
PAPER = find_model("gpt-nano").with_changes(dim=DIM, num_heads=HEADS, ffn_dim=4 * DIM, max_seq_len=SEQ)


class Layer(nn.Module):
    """The paper's layer: attention written out, dropout behind its weights and both sublayers; `future` is shared."""

    def __init__(self, future: Tensor) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.query, self.key, self.value, self.output = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.future = future

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.first_norm(x)), DROP)
        return x + F.dropout(self.down(F.gelu(self.up(self.second_norm(x)))), DROP)

    def attention(self, x: Tensor) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(DIM // HEADS)
        weights = F.softmax(scores.masked_fill(self.future, float("-inf")), dim=-1)
        return self.output((F.dropout(weights, DROP) @ value).transpose(1, 2).flatten(2))


def make(num_layers: int) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    future = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    model = nn.Sequential(*(Layer(future) for _ in range(num_layers))).bfloat16()
    return model, torch.randn(BATCH, SEQ, DIM, dtype=torch.bfloat16, requires_grad=True)


def kept_a_layer(word: str) -> int:
    """Bytes between forward and backward that one more layer adds, dropout drawn as in training."""
    totals = []
    for num_layers in (2, 3):
        model, x = make(num_layers)
        install(model, parse_recompute(word))
        known = [x, *model.parameters(), model[0].future]
        with stateless(MicroStep(0, 0, 0, BATCH, BATCH)):
            totals.append(saved_bytes(lambda model=model, x=x: model(x), known))
    return totals[1] - totals[0]


@pytest.mark.parametrize("word", ["none", "selective", "full"])
def test_a_layer_of_the_paper_keeps_what_the_paper_says(word: str) -> None:
    formula = layer_activation_bytes(PAPER, seq_len=SEQ, micro_batch=BATCH, kept=word)
    plain = 34 * SEQ * BATCH * DIM + (5 * HEADS * SEQ**2 * BATCH if word == "none" else 0)
    assert formula == (2 * SEQ * BATCH * DIM if word == "full" else plain)
    assert kept_a_layer(word) == pytest.approx(formula, rel=0.03)


def test_each_term_of_the_formula_is_a_tensor() -> None:
    """Storages that autograd saves of one layer are the formula's, and statistics of the two norms."""
    model, x = make(1)
    apart = {storage_key(t) for t in (x, model[0].future, *model.parameters())}
    seen: dict[int, tuple[torch.dtype, int]] = {}

    def note(tensor: Tensor) -> Tensor:
        if storage_key(tensor) not in apart:
            seen[storage_key(tensor)] = (tensor.dtype, tensor.untyped_storage().nbytes())
        return tensor

    with stateless(MicroStep(0, 0, 0, BATCH, BATCH)), saved_tensors_hooks(note, lambda tensor: tensor):
        model(x)
    stream, scores = SEQ * BATCH * DIM, HEADS * SEQ**2 * BATCH
    expected = Counter(
        {
            (torch.bfloat16, 2 * stream): 1
            + 1
            + 3
            + 1
            + 1,  # a norm's input, what follows norms, q k v, mixed
            (torch.bool, stream): 2,
            (torch.bfloat16, 8 * stream): 2,  # before and behind GELU
            (torch.bfloat16, 2 * scores): 2,  # softmax, and what dropout leaves of it
            (torch.bool, scores): 1,
        }
    )
    largest_statistic = 4 * SEQ * BATCH  # mean and deviation of a norm's rows, 2 or 4 bytes each
    assert Counter(kind for kind in seen.values() if kind[1] > largest_statistic) == expected
