"""Tiny models of transformers, their samples and a folder of weights for each: what the tests of this folder share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.training.hf import HfBuild

_LANGUAGE = {"num_layers": 2, "dim": 32, "num_heads": 4, "max_seq_len": 16, "vocab_size": 67}
SIZES: dict[str, dict[str, int]] = {
    "gpt2": _LANGUAGE,
    "llama": _LANGUAGE | {"ffn_dim": 44, "num_kv_heads": 2},
    "qwen2": _LANGUAGE | {"ffn_dim": 44, "num_kv_heads": 2},
    "qwen3": _LANGUAGE | {"ffn_dim": 44, "num_kv_heads": 2},
    "bert": _LANGUAGE | {"ffn_dim": 44},
    "vit": {"num_layers": 2, "dim": 32, "num_heads": 4, "ffn_dim": 44},
}
FAMILIES = list(SIZES)


class Samples:
    """Samples of a family as a function of their index, with unequal numbers of labels that count."""

    def __init__(self, family: str, num_samples: int = 24) -> None:
        self.family = family
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        if self.family == "vit":
            pixels = torch.randn(3, 224, 224, generator=generator)
            return {"pixel_values": pixels, "labels": torch.tensor(-100 if index % 5 == 3 else index % 2)}
        ids = torch.randint(3, 67, (12,), generator=generator)
        valid = torch.arange(12) < 12 - index % 5
        if self.family == "bert":
            chosen = valid & (torch.rand(12, generator=generator) < 0.4)
            labels = ids.masked_fill(~chosen, -100)
            return {"input_ids": ids, "attention_mask": valid.long(), "labels": labels}
        return {"input_ids": ids, "attention_mask": valid.long(), "labels": ids.masked_fill(~valid, -100)}


def save(family: str, folder: Path, *, seed: int = 3, vocab_size: int | None = None, **options: Any) -> Any:
    """A model of `family` with weights in `folder`, written by transformers itself; returns the model."""
    sizes = SIZES[family] | ({"vocab_size": vocab_size} if vocab_size else {})
    source = HfBuild(family, sizes=sizes).source()
    torch.manual_seed(seed)
    model = source.model_class(source.config)
    with torch.no_grad():
        for parameter in model.parameters():  # nothing that is zero or one could be told from a missing value
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(folder, **options)
    return model
