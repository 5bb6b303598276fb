"""Stages of ranks that have a part of the tokens: what is shorter on its way, and where it is whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.layout.tensor_layout import TensorLayout, TokenChain
from meshwright.models import language_model_loss
from meshwright.pipeline.cut import Cut, make_stages
from meshwright.pipeline.tokens import cut_tokens
from tests.pipeline.test_cutting import batch_of, make_gpt, tape_of
from tests.verification.models import Tokens

BLOCKS = tuple(f"blocks.{i}" for i in range(4))


@pytest.mark.parametrize(
    ("count", "ours", "shape"), [(4, (0, (2, 2, 4)), (2, 7, 24)), (3, (1, (4, 3, 7)), (3, 3, 24))]
)
def test_a_stage_hands_on_the_tokens_that_a_rank_has(count, ours, shape):
    """Whole samples where tp divides them, else a part of the sequence."""
    tape = tape_of(make_gpt(), language_model_loss, batch_of(Tokens(101, 7), count))
    stages = make_stages(tape, Cut(("blocks.0", "blocks.2", "head")))
    layout = TensorLayout(2, 1, chain=TokenChain((*BLOCKS, "final_norm"), None))
    local, tokens = cut_tokens(tape, layout)
    assert [tokens.of_stage(stage) for stage in stages] == [None, None, ours, ours]
    shapes = [[local.values[n].shape for n in stage.receives] for stage in stages]
    assert shapes == [[], [(count, 7, 24)], [shape], [shape]]
    ends = TensorLayout(2, 1, chain=TokenChain((*BLOCKS, "final_norm"), "final_norm"))
    assert [cut_tokens(tape, ends)[1].of_stage(stage) for stage in stages] == [None, None, ours, None]
    assert cut_tokens(tape, TensorLayout(2, 1))[0] is tape


def test_what_is_made_between_blocks_in_another_shape():
    class Reduced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            return self.blocks[1](x + x.mean(1, keepdim=True))

    tape = tape_of(Reduced(), lambda m, b: (m(b).sum(), 2), torch.randn(2, 4, 6))
    layout = TensorLayout(2, 0, chain=TokenChain(("blocks.0", "blocks.1"), "blocks.1"))
    with pytest.raises(
        PlanError, match=r"E268 plan.sequence_parallel with plan.pp: between repeated blocks mean\(\)"
    ):
        cut_tokens(tape, layout)
