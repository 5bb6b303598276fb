"""What torch.export cannot read: fewer formulas, other ways, or an error that says why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.capture.capture import capture
from meshwright.capture.run import run_graph
from meshwright.errors import ConfigError
from meshwright.graph.formula import BATCH
from tests.capture.checking import assert_runs_as_module, counted, kept_by_autograd


class Tagger(nn.Module):
    """Predicts the kept positions of tokens; `how` chooses what makes it hard to read."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embedding = nn.Embedding(20, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.how == "halves":
            x = F.avg_pool1d(x.mT, 3, stride=2).mT
        elif self.how == "length":
            assert x.shape[1] == 8, "eight positions"
        elif self.how == "kept":
            x = x[tokens > 9]
        elif self.how == "branch" and float(x.sum()) < 1e9:
            x = 2 * x
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def kept_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits = model(batch["tokens"])
    return logits.square().sum(), (batch["tokens"] > 9).sum()


def tokens(batch: int, sequence: int = 8) -> dict[str, Tensor]:
    return {"tokens": torch.arange(batch * sequence).view(batch, sequence) % 20}


@pytest.mark.parametrize("how", ["halves", "length"])
def test_a_size_that_is_no_formula_is_fixed_and_said(how):
    model = Tagger(how).double()
    graph = capture(model, kept_loss, tokens(3))
    assert (graph.source, graph.free) == ("torch.export", ("batch",))
    assert graph.notes[0].startswith("W131 costs hold for sequence = 8 only: ")
    assert graph.flops().uses == {"batch"}
    assert_runs_as_module(graph, model, kept_loss, tokens(5))
    assert counted(model, kept_loss, tokens(5))[0] == graph.flops()(5, 8)
    with pytest.raises(ConfigError, match=r"E134 .*sequence = 8 and has no formula for sequence = 7"):
        run_graph(graph, model, tokens(3, 7))


def test_a_branch_on_values_is_read_module_by_module():
    model = Tagger("branch").double()
    graph = capture(model, kept_loss, tokens(3))
    assert (graph.source, graph.free) == ("modules", ())
    assert graph.notes[0].startswith("W130 read module by module at this batch only: ")
    paths = [task.path for task in graph.tasks if task.op == "module:Linear"]
    assert paths == ["blocks.0", "blocks.1", "blocks.2", "head"]
    assert counted(model, kept_loss, tokens(3))[0] == graph.flops()(3, 8)
    assert kept_by_autograd(model, kept_loss, tokens(3)) == graph.saved_bytes()(3, 8)
    assert graph.num_parameters() == sum(p.numel() for p in model.parameters())
    with pytest.raises(ConfigError, match=r"E136 .*was read by modules"):
        run_graph(graph, model, tokens(3))


def no_branch_loss(model: Tagger, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Rows of the kept positions only: how many, nobody knows before."""
    kept = model(batch["tokens"])
    return kept.view(kept.size(0) // 2, -1).sum(), 1


def test_shapes_that_depend_on_values_are_read_by_fx():
    model = Tagger("kept").double()
    graph = capture(model, no_branch_loss, tokens(4))
    assert graph.source == "torch.fx", graph.notes
    assert graph.notes[0].startswith("read by torch.fx at this batch only: ")
    assert counted(model, no_branch_loss, tokens(4))[0] == graph.flops()(4, 8)
    assert kept_by_autograd(model, no_branch_loss, tokens(4)) == graph.saved_bytes()(4, 8)
    assert {task.path for task in graph.tasks} >= {"blocks.0", "blocks.2", "head"}


def test_on_meta_a_branch_on_values_is_an_error():
    with torch.device("meta"):
        model = Tagger("branch")
    with pytest.raises(ConfigError, match=r"E131 Tagger cannot be traced without values"):
        capture(model, kept_loss, tokens(3))


def test_a_loss_that_does_not_run_is_an_error():
    def wrong(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["words"])

    with pytest.raises(ConfigError, match=r"E130 Tagger does not run on this batch: KeyError: 'words'"):
        capture(Tagger(""), wrong, tokens(3))


@pytest.mark.parametrize(
    ("batch", "text"), [({}, r"here it is \[\]"), ((torch.ones(2), torch.ones(3)), r"\[2, 3\]")]
)
def test_a_batch_without_samples_is_an_error(batch, text):
    with pytest.raises(ConfigError, match=f"E137 Tagger: .*{text}"):
        capture(Tagger(""), kept_loss, batch)


class Sevenfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.relu()

    @staticmethod
    def backward(ctx, grad):
        return 7 * grad


def test_a_hand_written_backward_is_named():
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return Sevenfold.apply(model(batch["tokens"])).sum()

    before = torch.autograd.Function.__dict__["apply"]
    graph = capture(Tagger(""), loss, tokens(3))
    assert torch.autograd.Function.__dict__["apply"] is before
    assert [note[:50] for note in graph.notes] == ["W133 the hand-written backward of Sevenfold is not"]
    assert capture(Tagger(""), kept_loss, tokens(3)).notes == ()


def test_one_sample_is_read_as_one():
    model = Tagger("")
    graph = capture(model, kept_loss, tokens(1))
    assert graph.free == ("sequence",)
    assert capture(model, kept_loss, tokens(2)).flops().uses == BATCH.uses | {"sequence"}
