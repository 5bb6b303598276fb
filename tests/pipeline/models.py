"""Models that are hard to cut: skips, several inputs, branches on values, objects between modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.verification.models import Tokens


class UNet(nn.Module):
    """Two levels down and up, each level's features handed across to its mirror; batch normalisation, in-place ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _Double(1, 4)
        self.down = _Double(4, 8)
        self.bottom = _Double(8, 8)
        self.up = _Double(16, 8)
        self.last = _Double(12, 4)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 1, 8, 8) to a class for each pixel."""
        one = self.first(x)
        two = self.down(F.max_pool2d(one, 2))
        three = self.bottom(F.max_pool2d(two, 2))
        two = self.up(torch.cat([two, F.interpolate(three, scale_factor=2)], 1))
        return self.head(self.last(torch.cat([one, F.interpolate(two, scale_factor=2)], 1)))


class _Double(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.again = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.again(F.relu(self.norm(self.conv(x)))))


class Images:
    """Images and the class of each pixel, as a function of their index."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(1, 8, 8, generator=generator)
        return {"image": image, "classes": (image[0] > 0).long() + (image[0] > 1)}


def pixel_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    total = F.cross_entropy(model(batch["image"]), batch["classes"], reduction="sum")
    return total, batch["classes"].numel()


class EncoderDecoder(nn.Module):
    """Every layer of the decoder reads the encoder's result; one embedding for both and for the head; a mask.

    The mask is made from the batch once and used everywhere, a gate of the first layer by the last one.
    """

    def __init__(self, vocabulary: int, dim: int = 16) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocabulary, dim)
        self.encoder = nn.ModuleList(_Layer(dim) for _ in range(2))
        self.decoder = nn.ModuleList(_Layer(dim) for _ in range(2))
        self.register_buffer("gain", torch.tensor(0.7))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Tokens (batch, sequence) twice to logits."""
        mask = (source != 0).unsqueeze(-1)
        x = self.shared(source)
        gate = x.mean(1, keepdim=True)
        for layer in self.encoder:
            x, _ = layer({"x": x, "mask": mask})
        memory = x
        y = self.shared(target) * self.gain
        for layer in self.decoder:
            y, gate = layer({"x": y + memory.mean(1, keepdim=True), "mask": mask}, gate=gate)
        return (y * gate.sigmoid()) @ self.shared.weight.t()


class _Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.dropout = nn.Dropout(0.2)

    def forward(self, given: dict[str, Tensor], gate: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = given["x"]
        y = self.dropout(F.gelu(self.mix(self.norm(x)))) * given["mask"]
        return x + y, None if gate is None else gate * 0.9


class Varying(Tokens):
    """Sequences of two lengths, so that attention costs a part of a block that differs from rank to rank."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {name: x[: 2 + 38 * (index // 2 % 2)] for name, x in sample.items()}


class Pairs(Tokens):
    """Two sequences and labels."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        one, two = super().__getitem__(index), super().__getitem__(index + 1)
        return {"source": two["tokens"], "target": one["tokens"], "labels": one["labels"]}


def pair_loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits = model(batch["source"], target=batch["target"])
    labels = batch["labels"]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


class Uneven(nn.Module):
    """A perceptron of unequal layers in one Sequential, with an activation in place, a frozen and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 40),
            nn.ReLU(inplace=True),
            nn.Linear(40, 10),
            nn.Tanh(),
            nn.Linear(10, 10),
            nn.Linear(10, 3),
        )
        self.body[4].requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) to logits."""
        return self.body(x)


def make_gpt2() -> nn.Module:
    """GPT-2 of transformers, tied, with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=101, n_positions=16, n_embd=24, n_layer=3, n_head=4))


def make_t5() -> nn.Module:
    """T5 of transformers: one embedding for all, position biases of the first layers used by the others."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.1}
    return T5ForConditionalGeneration(T5Config(vocab_size=101, decoder_start_token_id=0, **sizes))


def t5_loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=batch["source"], decoder_input_ids=batch["target"], use_cache=False).logits
    labels = batch["labels"]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()
