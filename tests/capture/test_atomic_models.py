"""Phase 1 on captured models: shared weights, shared inputs, buffers, losses of two tensors.

The list of cases is that of RaNNC's own tests (names in `test/models.py` there); models and values are written here.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.capture.capture import capture
from meshwright.partitioning.atomic import atomic_parts


class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x))


class SharedTranspose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        turned = self.weight.t()
        return x @ turned @ turned


class SharedInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x) * x)


def parts_of(model, x):
    """The graph, its parts, and the part of each op."""
    graph = capture(model, lambda net, batch: net(batch["x"]).float().pow(2).mean(), {"x": x})
    found = atomic_parts(graph)
    ops = [graph.tasks[part.task].op.split(".")[1] for part in found.parts]
    kinds = {graph.value[sent.value].kind for sent in found.sent}
    assert kinds == {"activation"}, "weights, buffers and inputs are never sent"
    assert not any(graph.value[sent.value].is_constant for sent in found.sent)
    return graph, found, ops


def test_a_tied_embedding_is_shared_by_its_two_parts():
    graph, found, ops = parts_of(TiedEmbedding(), torch.zeros(2, 4, dtype=torch.long))
    assert [users for _, users in found.shared] == [(ops.index("embedding"), ops.index("linear"))]
    assert graph.ties()


def test_a_transposed_weight_is_cloned_and_the_weight_shared():
    _, found, ops = parts_of(SharedTranspose(), torch.zeros(2, 8))
    products = [number for number, part in enumerate(found.parts) if part.constants]
    assert products == [number for number, op in enumerate(ops) if op == "matmul"]
    assert len(products) == found.num_clones == 2
    assert [users for _, users in found.shared] == [tuple(products)]
    assert (products[0], (products[1],)) in [(sent.producer, sent.consumers) for sent in found.sent]


def test_an_input_of_two_layers_is_read_twice():
    _, found, ops = parts_of(SharedInput(), torch.zeros(2, 8))
    assert (ops[:3], found.shared) == (["linear", "mul", "linear"], ())
    assert [(sent.producer, sent.consumers) for sent in found.sent][:2] == [(0, (1,)), (1, (2,))]


def test_running_statistics_stay_with_their_part():
    graph, found, ops = parts_of(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)).train(), torch.zeros(2, 8))
    users = [
        number
        for number, part in enumerate(found.parts)
        for task in (*part.constants, part.task)
        if any(graph.value[name].kind == "buffer" for name in graph.tasks[task].inputs)
    ]
    assert users
    assert max(users) < ops.index("linear"), "no later part reads a buffer"


def test_a_loss_of_two_tensors_is_one_part_at_the_end():
    def loss(net, batch):
        return torch.dot(net(batch["x"]).flatten(), batch["y"].flatten())

    graph = capture(nn.Linear(8, 8), loss, {"x": torch.zeros(2, 8), "y": torch.zeros(2, 8)})
    found = atomic_parts(graph)
    ops = [graph.tasks[part.task].op.split(".")[1] for part in found.parts]
    assert (len(ops), ops[0], ops[-1]) == (4, "linear", "dot")
    # both flattened tensors come to the scalar, whichever task the graph has first; the label itself is read again
    assert sum(3 in sent.consumers for sent in found.sent) == 2
    assert {graph.value[sent.value].kind for sent in found.sent} == {"activation"}
