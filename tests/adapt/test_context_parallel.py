"""How attention is found in a model under plan.cp, and what is refused because it would see one rank's positions."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.adapt.context_hf import describe_mask
from meshwright.adapt.context_parallel import ContextScope, Kind, Place, check_model, described_attention
from meshwright.adapt.random_calls import attention_draw
from meshwright.comm.log import CommLog
from meshwright.comm.ops import Group
from meshwright.errors import PlanError
from meshwright.layout.sequence import cut_sequence


def _scope() -> tuple[ContextScope, Place]:
    """One of two ranks, with 4 positions of 8; nothing below communicates."""
    return ContextScope(Group("cp", (0, 1), 0, None, CommLog()), "ring"), Place(cut_sequence(8, 2, "ring"))


def _x(length: int = 4) -> torch.Tensor:
    return torch.zeros(2, 3, length, 6)


REFUSED = {
    "E250 plan.cp = 2: attention in the loss has a mask of shape (4, 4), which was made from this rank's positions": (
        lambda: F.scaled_dot_product_attention(_x(), _x(), _x(), torch.ones(4, 4, dtype=torch.bool))
    ),
    "E250 plan.cp = 2: attention in the loss has queries of shape (2, 3, 4, 6) to keys of shape (2, 3, 5, 6)": (
        lambda: F.scaled_dot_product_attention(_x(), _x(5), _x(5))
    ),
    "E254 plan.cp = 2: a softmax over scores of shape (2, 3, 4, 4), attention written out, in the loss would see": (
        lambda: (_x() @ _x().mT).softmax(-1)
    ),
    "E254 plan.cp = 2: torch.arange(4), positions counted from 0, in the loss would see": lambda: (
        torch.arange(4)
    ),
    "E254 plan.cp = 2: no attention was seen in the forward": lambda: torch.arange(1, 5),
}


@pytest.mark.parametrize("text", list(REFUSED))
def test_what_would_see_one_ranks_positions_is_refused(text) -> None:
    scope, place = _scope()
    with pytest.raises(PlanError) as caught, scope.forward(place):
        REFUSED[text]()
    assert f"{caught.value.code} {caught.value.message}".startswith(text)
    assert "plan.cp=1" in caught.value.message


def test_outside_of_a_forward_nothing_is_looked_at() -> None:
    scope, _ = _scope()
    with scope.entered(), scope.entered():
        assert torch.arange(4).tolist() == [0, 1, 2, 3]
    assert F.scaled_dot_product_attention(_x(), _x(), _x(), torch.ones(4, 4)).shape == _x().shape


def test_batch_statistics_are_refused() -> None:
    with pytest.raises(PlanError) as caught:
        check_model(nn.Sequential(nn.BatchNorm1d(3)), 2)
    assert caught.value.code == "E254"
    assert "Sequential has batch normalisation (1 layers)" in caught.value.message


def test_dropout_in_attention_needs_stateless_masks() -> None:
    with pytest.raises(PlanError) as caught:
        attention_draw(_x(), (2, 3, 8, 8), 0.1)
    assert caught.value.code == "E208"
    assert 'needs train.dropout = "stateless"' in caught.value.message


def test_masks_of_transformers_are_read_or_refused() -> None:
    from transformers import masking_utils as masks

    causal, window = masks.causal_mask_function, masks.sliding_window_causal_mask_function(7)
    packed = masks.packed_sequence_mask_function(torch.zeros(1, 4))
    remapped = masks.remap_positions_for_packed_sequence(window, torch.zeros(1, 4))
    assert describe_mask(causal) == Kind(is_causal=True)
    assert describe_mask(masks.bidirectional_mask_function) == Kind(is_causal=False)
    assert describe_mask(window) == Kind(is_causal=True, window=7)
    assert describe_mask(masks.and_masks(remapped, packed)) == Kind(is_causal=True, window=7)
    assert describe_mask(masks.sliding_window_bidirectional_mask_function(3)) == Kind(
        is_causal=False, window=4
    )
    chunks = masks.chunked_causal_mask_function(4, torch.zeros(1))
    for function, name in ((chunks, "chunked_overlay"), (masks.or_masks(causal, causal), "or_masks")):
        with pytest.raises(PlanError) as caught:
            describe_mask(function)
        assert caught.value.code == "E250"
        assert f"the mask {name} of transformers is not built over ranks" in caught.value.message


def test_a_transformers_model_outside_of_a_step_is_refused() -> None:
    """Its attention is over ranks, and nothing has cut the sequence."""
    x = torch.zeros(1, 1, 2, 2)
    with pytest.raises(PlanError) as caught:
        described_attention(x, x, x, Kind(is_causal=True), dropout_p=0.0, scale=None)
    assert caught.value.code == "E255"
    assert "was called outside of model.step() and job.evaluate()" in caught.value.message
