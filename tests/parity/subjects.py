"""Random models for the trials of verify: families with what breaks comparisons, their sizes drawn."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.models import (
    GPT,
    MLP,
    GPTConfig,
    Llama,
    LlamaConfig,
    MLPConfig,
    classification_loss,
    language_model_loss,
)
from meshwright.verification.job import Functions
from tests.verification.models import Net, Noisy, Peculiar, Rows, loss_of_labels, two_losses


class Tokens:
    """Sequences of unequal numbers of valid labels, some of them without any."""

    def __init__(self, num_samples: int, vocab_size: int, seq_len: int) -> None:
        self.num_samples, self.vocab_size, self.seq_len = num_samples, vocab_size, seq_len

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocab_size, (self.seq_len + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[: index % (self.seq_len + 1)] = -100
        return {"tokens": tokens[:-1], "labels": labels}


class Inputs:
    """Tensors of any shape with a class each, some of them ignored."""

    def __init__(self, num_samples: int, shape: tuple[int, ...], num_classes: int) -> None:
        self.num_samples, self.shape, self.num_classes = num_samples, shape, num_classes

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs = torch.randn(self.shape, generator=torch.Generator().manual_seed(index))
        label = -100 if index % 7 == 3 else index % self.num_classes
        return {"inputs": inputs, "labels": torch.tensor(label)}


class Convolutions(nn.Module):
    """Convolutions, batch statistics (of 2 dims and 1), channel dropout."""

    def __init__(self, channels: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels if i else 2, channels, 3, padding=1, bias=i == 0),
                nn.BatchNorm2d(channels, momentum=None if i else 0.1, affine=i != 1),
                nn.ReLU(inplace=True),
                nn.Dropout2d(dropout),
            )
            for i in range(num_layers)
        )
        self.norm = nn.BatchNorm1d(channels, track_running_stats=False)
        self.head = nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean((2, 3))))


class Encoder(nn.Module):
    """torch's own encoder with dropout, attention included; blocks in any order, some of them recomputed."""

    def __init__(self, heads: int, head_dim: int, order: tuple[int, ...], *, recomputes: bool) -> None:
        super().__init__()
        dim = heads * head_dim
        self.order, self.recomputes = order, recomputes
        self.embed = nn.Embedding(13, dim, padding_idx=0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 2 * dim + 1, dropout=0.2, batch_first=True)
            for _ in range(3)
        )
        self.head = nn.Linear(dim, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index in self.order:
            layer = self.layers[index]
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.head(x)


class Recurrent(nn.Module):
    """A GRU between an embedding and a head; its output is a tuple."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.gru = nn.GRU(width, width + 1, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(width + 1)
        self.head = nn.Linear(width + 1, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        output, _ = self.gru(self.embed(tokens))
        return self.head(self.norm(output))


def mean_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """A bare scalar that is a mean over samples."""
    return F.cross_entropy(model(batch["inputs"]), batch["labels"].clamp(min=0))


Drawn = tuple[Functions | None, list[str]]


def _gpt(draw: Random) -> Drawn:
    heads, vocab, seq = draw.randint(1, 3), draw.choice((19, 31)), draw.randint(3, 7)
    config = GPTConfig(
        num_layers=draw.randint(1, 3),
        dim=heads * draw.choice((4, 6, 8)),
        num_heads=heads,
        ffn_dim=draw.choice((17, 32, 53)),
        vocab_size=vocab,
        max_seq_len=seq,
        tied_embedding=draw.random() < 0.5,
        dropout=draw.choice((0.0, 0.1, 0.5)),
    )
    return Functions(lambda: GPT(config), language_model_loss, Tokens(draw.randint(7, 60), vocab, seq)), []


def _llama(draw: Random) -> Drawn:
    kv_heads, seq = draw.randint(1, 2), draw.randint(3, 7)
    heads = kv_heads * draw.randint(1, 2)
    config = LlamaConfig(
        num_layers=draw.randint(1, 3),
        dim=heads * draw.choice((4, 6)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_dim=draw.choice((17, 37)),
        vocab_size=23,
        max_seq_len=seq,
        tied_embedding=draw.random() < 0.5,
    )
    return Functions(lambda: Llama(config), language_model_loss, Tokens(draw.randint(7, 60), 23, seq)), []


def _mlp(draw: Random) -> Drawn:
    config = MLPConfig(
        num_layers=draw.randint(1, 4), dim=draw.randint(5, 40), input_dim=draw.randint(1, 9), num_classes=5
    )
    data = Inputs(draw.randint(5, 60), (config.input_dim,), 5)
    loss = draw.choice((classification_loss, mean_loss))
    return Functions(lambda: MLP(config), loss, data), []


def _convolutions(draw: Random) -> Drawn:
    sizes = (draw.randint(2, 6), draw.randint(1, 3), draw.choice((0.0, 0.3)))
    side = draw.randint(3, 6)
    data = Inputs(draw.randint(7, 40), (2, side, side), 4)
    return Functions(lambda: Convolutions(*sizes), classification_loss, data), []


def _encoder(draw: Random) -> Drawn:
    order = draw.choice(((0, 1, 2), (2, 0, 1), (0, 1, 0), (1, 2), (0, 0, 1, 2)))
    sizes, recomputes = (draw.randint(1, 3), draw.choice((4, 6))), draw.random() < 0.3
    data = Tokens(draw.randint(7, 40), 13, draw.randint(3, 6))
    return Functions(lambda: Encoder(*sizes, order, recomputes=recomputes), language_model_loss, data), []


def _recurrent(draw: Random) -> Drawn:
    width, data = draw.randint(4, 9), Tokens(draw.randint(7, 40), 11, draw.randint(3, 6))
    return Functions(lambda: Recurrent(width), language_model_loss, data), []


def _user(draw: Random) -> Drawn:
    data = Rows(draw.randint(5, 60))
    normalises = draw.random() < 0.5
    builds: list[tuple[Callable[[], nn.Module], Any]] = [
        (Net, loss_of_labels),
        (Peculiar, two_losses),
        (lambda: Noisy(normalises=normalises), loss_of_labels),
    ]
    build, loss = draw.choice(builds)
    return Functions(build, loss, data), []


def _preset(draw: Random) -> Drawn:
    """What a run file names, cut as the command cuts it."""
    name = draw.choice(("gpt-nano", "llama-nano", "mlp-digits", "gpt2-124m", "llama-1b"))
    return None, [f"model.source=preset:{name}", f"data.train={'digits' if 'mlp' in name else 'stdlib'}"]


FAMILIES: dict[str, Callable[[Random], Drawn]] = {
    "gpt": _gpt,
    "llama": _llama,
    "mlp": _mlp,
    "convolutions": _convolutions,
    "encoder": _encoder,
    "recurrent": _recurrent,
    "user's": _user,
    "preset": _preset,
}
