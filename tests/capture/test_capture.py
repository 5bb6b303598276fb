"""Captured graphs against their modules, and costs at sizes that were not captured."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.capture.capture import capture
from meshwright.capture.run import run_graph
from meshwright.errors import ConfigError
from meshwright.graph.formula import BATCH, SEQUENCE
from meshwright.graph.task_graph import TaskGraph
from meshwright.models import GPT, MLP, GPTConfig, MLPConfig
from meshwright.models.loss import classification_loss, language_model_loss
from tests.capture.checking import assert_runs_as_module, counted, kept_by_autograd

LAYERS, DIM, VOCABULARY = 3, 32, 96
# Neither batch nor sequence of these was captured.
OTHER_SIZES = ((2, 9), (5, 40))


def text(batch: int, sequence: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(batch)
    tokens = torch.randint(0, VOCABULARY, (batch, sequence + 1), generator=draw)
    return {"tokens": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}


def gpt(dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    sizes = {"num_layers": LAYERS, "dim": DIM, "num_heads": 4, "ffn_dim": 4 * DIM, "vocab_size": VOCABULARY}
    return GPT(GPTConfig(**sizes, max_seq_len=64, dropout=dropout)).double()


@pytest.fixture(scope="module")
def graph() -> TaskGraph:
    return capture(gpt(0.1), language_model_loss, text(3, 17))


def test_flops_equal_the_closed_form(graph):
    """24 d^2 of weights a layer and token, 4 d s of attention, 2 d V of the head."""
    per_token = LAYERS * (24 * DIM**2 + 4 * DIM * SEQUENCE) + 2 * DIM * VOCABULARY
    assert graph.flops() == BATCH * SEQUENCE * per_token
    assert graph.backward_flops() == 2 * graph.flops()
    assert graph.causal_flops() == BATCH * SEQUENCE * (per_token - LAYERS * 2 * DIM * SEQUENCE)


@pytest.mark.parametrize(("batch", "sequence"), OTHER_SIZES)
def test_a_language_model_runs_node_by_node_at_other_sizes(graph, batch, sequence):
    model, samples = gpt(0.1), text(batch, sequence)
    assert_runs_as_module(graph, model, language_model_loss, samples)
    assert counted(model, language_model_loss, samples) == (
        graph.flops()(batch, sequence),
        graph.backward_flops()(batch, sequence),
    )
    assert kept_by_autograd(model, language_model_loss, samples) == graph.saved_bytes()(batch, sequence)


def test_a_graph_tells_ties_paths_and_random_tasks(graph):
    assert graph.ties() == (("token_embedding.weight", "head.weight"),)
    assert graph.num_parameters() == sum(p.numel() for p in gpt().parameters())
    paths = {task.path for task in graph.tasks if task.op == "aten.linear.default"}
    assert "blocks.1.attention.query" in paths
    random = [task for task in graph.tasks if task.is_random]
    assert len(random) == 1 + 3 * LAYERS  # embedding; attention weights and both outputs of a block
    assert not any(task.is_constant for task in random)


def test_without_dropout_attention_keeps_no_scores():
    model, samples = gpt(), text(2, 9)
    graph = capture(model, language_model_loss, text(3, 17))
    assert not any(task.is_random for task in graph.tasks)
    saved = graph.saved_bytes()
    assert all(powers[1] < 2 for powers, _ in saved.terms)
    assert kept_by_autograd(model, language_model_loss, samples) == saved(2, 9)
    positions = next(task for task in graph.tasks if task.op.startswith("aten.arange"))
    assert positions.is_constant


def test_a_model_without_a_sequence():
    model = MLP(MLPConfig(num_layers=2, dim=16, input_dim=8, num_classes=4)).double()
    samples = {"inputs": torch.randn(6, 8, dtype=torch.float64), "labels": torch.randint(0, 4, (6,))}
    graph = capture(model, classification_loss, {name: x[:4] for name, x in samples.items()})
    assert (graph.free, graph.sequence) == (("batch",), 0)
    assert graph.flops() == BATCH * 2 * (8 * 16 + 16 * 16 + 16 * 4)
    # No gradient of the inputs is needed.
    assert graph.backward_flops() == BATCH * 2 * (8 * 16 + 2 * 16 * 16 + 2 * 16 * 4)
    assert kept_by_autograd(model, classification_loss, samples) == graph.saved_bytes()(6, 0)
    assert_runs_as_module(graph, model, classification_loss, samples)


class Statistics(nn.Module):
    """Batch statistics, changes in place, a constant, a tensor that is not learned."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.activation = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)
        self.head.weight.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        x = self.activation(self.norm(self.convolution(images)))
        self.calls.add_(1)
        return self.head(x.mean((2, 3))) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])


def image_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    images, labels = batch["images"], batch["labels"]
    return F.cross_entropy(model(images), labels, reduction="sum"), labels.shape[0]


def images(batch: int) -> dict[str, Tensor]:
    return {"images": torch.randn(batch, 3, 9, 9).double(), "labels": torch.arange(batch) % 5}


def test_buffers_change_as_in_the_module():
    model = Statistics().double()
    graph = capture(model, image_loss, images(3))
    mutated = {graph.value[name].path for task in graph.tasks for name in task.mutates}
    assert {"calls", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"} <= mutated
    assert not any(graph.value[name].is_constant for task in graph.tasks for name in task.mutates)
    assert_runs_as_module(graph, model, image_loss, images(7))
    assert counted(model, image_loss, images(7)) == (graph.flops()(7, 0), graph.backward_flops()(7, 0))
    assert kept_by_autograd(model, image_loss, images(7)) == graph.saved_bytes()(7, 0)
    assert graph.outputs[1] == BATCH


def test_a_model_on_meta_gives_the_same_graph_and_runs_with_values():
    with torch.device("meta"):
        model = Statistics().double()
    graph = capture(model, image_loss, images(3))
    assert graph == capture(Statistics().double(), image_loss, images(3))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert_runs_as_module(graph, Statistics().double(), image_loss, images(4))
    lost = tuple(dataclasses.replace(value, data="") for value in graph.values)
    with pytest.raises(ConfigError, match=r"E136 .*lifted_tensor_0.* has no values"):
        run_graph(dataclasses.replace(graph, values=lost), Statistics().double(), images(3))
