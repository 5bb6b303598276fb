"""selective:OPS: named operations run again, the same gradients to the bit, and their results are not kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.errors import PlanError
from meshwright.layout.recompute import parse_recompute
from meshwright.recompute.install import install
from meshwright.recompute.live_bytes import saved_bytes
from tests.recompute.test_selective import MovingWeights, gradients

ROWS, DIM = 6, 8
ONE = ROWS * 4 * DIM * 8  # bytes of one wide activation


class Block(nn.Module):
    """Operations that feed each other, a view of a result, a weight among arguments, and one in place."""

    def __init__(self, *, inplace: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(2 * DIM, DIM)
        self.act, self.dropout = nn.ReLU(inplace=inplace), nn.Dropout(0.3)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        wide = self.act(self.up(F.layer_norm(x, (DIM,), self.norm.weight, self.norm.bias)))
        inner = (lambda y: checkpoint(self.end, y, use_reentrant=False)) if self.checkpoints else self.end
        return x + inner(wide)

    def end(self, wide: Tensor) -> Tensor:
        mixed = self.dropout(F.gelu(wide)).view(-1, 2, 2 * DIM).mul(1.5)
        return self.down(mixed.flatten(0, 1)).view(ROWS, 2, DIM).sum(1)


def make(**options: bool) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(**options) for _ in range(3))).double()
    return model, torch.randn(ROWS, DIM, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    "words", ["gelu", "gelu+dropout", "relu+gelu+dropout+layer_norm+view+mul", "linear+gelu"]
)
@pytest.mark.parametrize(
    "options", [{}, {"inplace": True}, {"checkpoints": True}], ids=["plain", "inplace", "checkpoint"]
)
def test_gradients_are_the_same_to_the_bit(words: str, options: dict[str, bool]) -> None:
    model, x = make(**options)
    expected = gradients(model, x)
    undo = install(model, parse_recompute(f"selective:{words}")).undo
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
    undo()
    assert all("forward" not in vars(block) for block in model)


def kept(words: str) -> int:
    """Bytes of activations that wait for the backward."""
    model, x = make()
    install(model, parse_recompute(words))
    return saved_bytes(lambda: model(x).sum(), [x, *model.parameters()])


def test_results_are_not_kept() -> None:
    # What dropout saves is dropout's own; behind it mul makes another tensor, which `down` saves.
    chained = kept("none") - kept("selective:gelu+dropout+mul")
    assert chained >= 3 * ONE
    assert kept("none") >= kept("selective:gelu") >= kept("selective:gelu+dropout") > kept("full")


def test_weights_that_move_are_read_where_they_are_in_backward() -> None:
    model, x = make()
    expected = gradients(model, x)
    weights = MovingWeights(model)
    install(model, parse_recompute("selective:layer_norm+linear+gelu"), weights=weights)
    model.zero_grad()
    x.grad = None
    torch.manual_seed(1)
    loss = model(x).square().sum()
    weights.move()
    loss.backward()
    got = [x.grad, *(p.grad for p in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_name_that_torch_does_not_know_is_refused() -> None:
    with pytest.raises(PlanError, match="torch has no function 'gelo'") as caught:
        install(make()[0], parse_recompute("selective:gelo"))
    assert caught.value.code == "E240"
