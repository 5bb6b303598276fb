"""Models, losses and data of the tests: small, with what breaks comparisons."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Rows:
    """Samples as a function of their index."""

    def __init__(self, num_samples: int = 40, features: int = 6) -> None:
        self.num_samples = num_samples
        self.features = features

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(self.features, generator=generator),
            "label": torch.tensor(-100 if index % 5 == 3 else index % 3),
        }


class Tokens:
    """Sequences of `length` tokens with unequal numbers of valid labels, as a function of their index."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self.vocab_size, self.length = vocab_size, length

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocab_size, (self.length + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[: index % 6] = -100
        return {"tokens": tokens[:-1], "labels": labels}


class Net(nn.Module):
    """Blocks, a tied head, a frozen layer and a parameter that no sample uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(2))
        self.frozen = nn.Linear(12, 12)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(12, 12, bias=False)
        self.tied.weight = self.blocks[1][0].weight
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(12, 3)
        self.register_buffer("gain", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.tied(self.frozen(x)) * self.gain)


def loss_of_labels(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(model(batch["x"]), batch["label"], ignore_index=-100, reduction="sum")
    return total, (batch["label"] != -100).sum()


class Noisy(nn.Module):
    """Dropout and a batch normalisation: masks by place, statistics of the global micro-step."""

    def __init__(self, *, normalises: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12) if normalises else nn.Identity()
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.norm(self.first(x)).relu()))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Peculiar(nn.Module):
    """A custom autograd function, an in-place op, a branch on each sample's values, and two outputs in a dict."""

    def __init__(self, branch_above: float = 1.0) -> None:
        super().__init__()
        self.branch_above = branch_above
        self.first = nn.Linear(6, 10)
        self.relu = nn.ReLU(inplace=True)
        self.rare = nn.Linear(10, 10)
        self.classes = nn.Linear(10, 3)
        self.energy = nn.Linear(10, 1)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = self.relu(self.first(inputs["x"]))
        chosen = (inputs["x"][:, 0] > self.branch_above).nonzero().flatten()
        if len(chosen):  # most ranks see no such sample
            x = x.index_add(0, chosen, self.rare(x[chosen]))
        x = _Square.apply(x)
        x += 0.25
        return {"classes": self.classes(x), "energy": self.energy(x)}


def two_losses(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    output = model(batch)
    labels = batch["label"].clamp(min=0)
    total = F.cross_entropy(output["classes"], labels, reduction="sum")
    return total + 0.1 * output["energy"].square().sum(), len(labels)
