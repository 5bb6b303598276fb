"""Models of the parity tests, small but with the structure that breaks parallel training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.gpt import GPT, GPTConfig
from meshwright.models.initial import initialise
from meshwright.models.llama import Llama, LlamaConfig
from meshwright.models.loss import classification_loss, language_model_loss
from meshwright.models.mlp import MLP, MLPConfig

VOCAB, SEQ, DIM = 31, 7, 24


class Awkward(nn.Module):
    """Unused, frozen, shared, tied and sometimes-used parameters; sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 11)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(11, 11), nn.Tanh()) for _ in range(3)])
        self.blocks[1][0].bias.requires_grad_(False)
        self.frozen = nn.Linear(11, 11)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(11, 11, bias=False)
        self.tied.weight = self.blocks[2][0].weight
        self.rare = nn.Linear(11, 11)
        self.unused = nn.Linear(3, 3)
        self.never = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(11, 4)

    def forward(self, inputs: Tensor, flags: Tensor) -> Tensor:
        x = self.embed(inputs)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2]):
            x = x + block(x)
        x = self.frozen(x) + self.tied(x)
        rows = flags.nonzero().flatten()
        if len(rows):  # on most ranks no sample has the flag
            x = x.index_add(0, rows, self.rare(x[rows]))
        return self.head(x)


def awkward_loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits = model(batch["inputs"], batch["flags"])
    valid = batch["labels"] != -100
    total = nn.functional.cross_entropy(logits, batch["labels"], ignore_index=-100, reduction="sum")
    return total, valid.sum()


def _plain(model: nn.Module) -> nn.Module:
    initialise(model, 1)
    with torch.no_grad():  # also exercise biases and norms away from their initial values
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def skeleton(name: str) -> nn.Module:
    """The model with torch's own values, or without memory under `torch.device("meta")`."""
    if name == "gpt":
        config = GPTConfig(
            vocab_size=VOCAB,
            max_seq_len=SEQ,
            dim=DIM,
            num_layers=2,
            num_heads=3,
            ffn_dim=53,
            tied_embedding=True,
        )
        return GPT(config)
    if name == "llama":
        sizes = {"dim": DIM, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 37}
        return Llama(LlamaConfig(vocab_size=VOCAB, max_seq_len=SEQ, **sizes))
    if name == "mlp":
        return MLP(MLPConfig(input_dim=5, dim=13, num_layers=3, num_classes=4))
    torch.manual_seed(2)
    return Awkward()


def build(name: str, dtype: torch.dtype) -> nn.Module:
    model = skeleton(name)
    return (model if name == "awkward" else _plain(model)).to(dtype)


def loss_of(name: str) -> Callable[[Any, Any], tuple[Tensor, Any]]:
    return {"gpt": language_model_loss, "llama": language_model_loss, "mlp": classification_loss}.get(
        name, awkward_loss
    )


def samples(name: str, position: int, count: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Global samples [position, position + count): a pure function of the position."""
    rows = [_sample(name, position + i, dtype) for i in range(count)]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def _sample(name: str, index: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + index)
    if name in ("gpt", "llama"):
        tokens = torch.randint(VOCAB, (SEQ + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[: index % (SEQ + 1)] = -100  # unequal valid tokens: 7, 6, ..., 0 a sample
        return {"tokens": tokens[:-1], "labels": labels}
    inputs = torch.randn(5, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.tensor(-100 if index % 5 == 3 else index % 4)
    row = {"inputs": inputs, "labels": labels}
    if name == "awkward":
        row["flags"] = torch.tensor(index % 6 == 1)
    return row
