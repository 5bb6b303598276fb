"""Layouts derived from graphs: which axes are cut, what stays whole and why, and which sizes code names."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.capture.capture import capture
from meshwright.models import language_model_loss
from meshwright.partitioning.axes import Axes
from meshwright.partitioning.derive_tensor import derive_layout
from meshwright.partitioning.tensor_regions import Column, OtherCut, Part, Row, Size
from tests.verification.handmade import Nano


def derived(model, loss, batch, num_ranks=2):
    from meshwright.adapt.tensor_derived import kinds_of

    return derive_layout(capture(model, loss, batch), kinds_of(model), num_ranks)


def tokens() -> dict[str, Tensor]:
    return {"tokens": torch.randint(101, (2, 7)), "labels": torch.randint(101, (2, 7))}


def rows(model, batch):
    return model(batch["x"]).square().sum(), len(batch["x"])


# Axes.


def test_a_view_splits_an_axis_and_its_users_follow():
    axes = Axes()
    fused = axes.make(72)
    thirds, rest = axes.regroup([fused], [3, 24])
    heads, width = axes.regroup([rest], [6, 4])
    assert axes.leaves(fused) == thirds + heads + width
    other = axes.make(24)
    assert axes.unite(other, rest)
    assert axes.leaves(other) == axes.leaves(rest) == axes.leaves(heads + width)


def test_axes_that_do_not_fit_are_not_united():
    axes = Axes()
    left, right = axes.make(12), axes.make(12)
    assert axes.regroup([left], [4, 3])
    assert axes.regroup([right], [3, 4])
    assert not axes.unite(left, right)
    assert axes.regroup([axes.make(10)], [4, 3]) is None


# Layouts.


def test_hand_written_attention_with_fused_projections_and_constant_heads():
    found = derived(Nano(), language_model_loss, tokens())
    attention, feed_forward = found.regions[:2]
    assert attention.units == 6
    assert attention.columns == (Column("h.0.attn.c_attn", Part(3, 4), 0),)
    assert attention.rows == (Row("h.0.attn.c_proj", Part(1, 4)),)
    assert attention.num_sums == (1, 1)
    named = {(call.kind, call.sizes[-2:]) for call in attention.shapes if call.names}
    assert ("view", (Size(6, True), Size(4, False))) in named
    assert ("split", (Size(24, True), Size(24, True))) in named
    assert feed_forward.units == 50
    assert feed_forward.heads == 0
    assert found.tables == ("wte",)
    assert found.heads == ("lm_head",)
    assert found.describe() == [
        "2 x h.*.attn.c_attn by columns -> h.*.attn.c_proj by rows: 6 heads, all-reduce 24*b*s forward, "
        "24*b*s backward",
        "2 x h.*.mlp.* by columns -> h.*.mlp.* by rows: 50 channels, all-reduce 24*b*s forward, 24*b*s backward",
        "wte: rows of the vocabulary, all-reduce of what is looked up",
        "lm_head: outputs cut, then gathered",
        "wpe stays whole: columns: layer_norm in h.0.ln_1 needs it whole; rows: few or fixed rows are looked up",
    ]


class Chain(nn.Module):
    """Unequal layers: of neighbours only one dim can be cut, and the wide pair is worth most."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_of_unequal_layers_the_pairs_that_share_most_work_are_cut():
    found = derived(Chain(6, 10, 60, 50, 8, 3), rows, {"x": torch.randn(2, 6)})
    pairs = [(region.columns[0].module, region.rows[0].module) for region in found.regions]
    assert pairs == [("layers.0", "layers.1"), ("layers.2", "layers.3")]
    # The first input needs no gradient, so nothing is summed for it in backward.
    assert [region.num_sums for region in found.regions] == [(1, 0), (1, 1)]
    assert list(found.whole) == ["layers.4"]
    assert found.whole["layers.4"].endswith("inputs: the layers beside it are cut")


def test_fewer_channels_than_ranks_stay_whole():
    found = derived(Chain(6, 3, 60, 50), rows, {"x": torch.randn(2, 6)}, num_ranks=4)
    assert [region.units for region in found.regions] == [60]
    assert found.whole["layers.0"].startswith("outputs: 3 are fewer than 4 ranks")


class Block(nn.Module):
    """What a test puts between two layers."""

    def __init__(self, between, **parts) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(8, 24), nn.Linear(24, 8), between
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self, self.up(x)))


WHERE = "in the loss or the root module"


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda m, x: x.softmax(-1), f"softmax {WHERE} needs it whole"),
        (lambda m, x: F.layer_norm(x, (24,)), f"layer_norm {WHERE} needs it whole"),
        (lambda m, x: x.flip(-1), f"flip {WHERE} needs it whole"),
        (lambda m, x: x - x.mean(-1, keepdim=True), f"mean {WHERE} needs it whole"),
        (lambda m, x: x[:, 4:] @ torch.ones(20, 24), f"slice {WHERE} takes a part of it"),
        (lambda m, x: x * m.scale, "scale trains on every rank and meets a part of it"),
        (lambda m, x: x @ m.w, "w is multiplied by code of the root module, not by a layer"),
        (lambda m, x: x * torch.arange(24), f"arange {WHERE} makes it whole"),
    ],
)
def test_what_stays_whole_says_why(between, reason):
    model = Block(between, w=nn.Parameter(torch.randn(24, 24)), scale=nn.Parameter(torch.ones(())))
    found = derived(model, rows, {"x": torch.randn(2, 8)})
    assert found.regions == ()
    assert reason in found.whole["up"], found.whole


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_gradients_of_whole_parameters_between_are_summed_unless_they_meet_wholes_too():
    found = derived(Block(lambda m, x: m.own(x), own=Scale()), rows, {"x": torch.randn(2, 8)})
    assert found.regions[0].summed == ("own.scale",)
    both = derived(
        Block(lambda m, x: m.own(x) * m.own(x[:, :1].detach()).sum(), own=Scale()),
        rows,
        {"x": torch.randn(2, 8)},
    )
    assert both.regions == ()


def test_a_parameter_between_is_cut_with_the_axis():
    found = derived(
        Block(lambda m, x: x * m.gain, gain=nn.Parameter(torch.ones(24))), rows, {"x": torch.randn(2, 8)}
    )
    assert found.regions[0].others == (OtherCut("gain", 0, Part(1, 1)),)


class Grouped(nn.Module):
    """Two key/value heads for six query heads, spread by an expansion."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(24, 24), nn.Linear(24, 8), nn.Linear(24, 8)
        self.o = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 6, 4).transpose(1, 2)
        k, v = (
            layer(x).view(b, t, 2, 1, 4).expand(b, t, 2, 3, 4).reshape(b, t, 6, 4).transpose(1, 2)
            for layer in (self.k, self.v)
        )
        scores = (q @ k.mT / math.sqrt(4)).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).reshape(b, t, 24))


def test_grouped_heads_are_cut_by_the_heads_of_keys():
    (region,) = derived(Grouped(), rows, {"x": torch.randn(2, 5, 24)}).regions
    assert (region.units, region.heads) == (2, 3)
    assert [column.part for column in region.columns] == [Part(1, 12), Part(1, 4), Part(1, 4)]
    assert region.rows == (Row("o", Part(1, 12)),)
    assert len({column.source for column in region.columns}) == 1
