"""BERT with 4.9 G parameters and ResNet152x8 on the meta device, for plans of 32 devices."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM


def bert(num_layers: int = 96):
    """Hidden 2048; its MLM loss."""
    config = BertConfig(
        hidden_size=2048, num_hidden_layers=num_layers, num_attention_heads=32, intermediate_size=8192
    )
    with torch.device("meta"):
        model = BertForMaskedLM(config).train()
    ids = torch.zeros(2, 128, dtype=torch.long)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(input_ids=batch["input_ids"], labels=batch["labels"]).loss

    return model, loss, {"input_ids": ids, "labels": ids}


class Bottleneck(nn.Module):
    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(width, inner, 1, bias=False)
        self.middle = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.expand = nn.Conv2d(inner, 4 * inner, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (inner, inner, 4 * inner))
        self.shortcut = (
            nn.Identity()
            if stride == 1 and width == 4 * inner
            else nn.Sequential(nn.Conv2d(width, 4 * inner, 1, stride, bias=False), nn.BatchNorm2d(4 * inner))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.reduce(x)))
        y = F.relu(self.norms[1](self.middle(y)))
        return F.relu(self.norms[2](self.expand(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, factor: int, depths: tuple[int, ...] = (3, 8, 36, 3)) -> None:
        super().__init__()
        width = 64 * factor
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks = []
        for level, depth in enumerate(depths):
            inner = 64 * factor * 2**level
            for number in range(depth):
                blocks.append(Bottleneck(width, inner, 2 if level and not number else 1))
                width = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


def resnet152x8():
    with torch.device("meta"):
        model = ResNet(8).train()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return model, loss, {"x": torch.zeros(2, 3, 224, 224), "y": torch.zeros(2, dtype=torch.long)}
