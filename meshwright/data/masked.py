"""Samples for masked language models, made of samples of a language model.

Owns which tokens are hidden: 15 %, of which 8 in 10 become the mask, 1 in 10 another id and 1 in 10 stay (Devlin et al.
2019, arXiv 1810.04805). The choice is a function of (seed, index of the sample), so it is the same on every mesh.
Simplification: a sample hides the same tokens in every epoch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.data.batches import MapStyle
from meshwright.data.dataset import IGNORED_LABEL

_HIDDEN, _MASKED, _RANDOM = 0.15, 0.8, 0.1


class MaskedDataset(Dataset[dict[str, Tensor]]):
    """Item: `input_ids`, `attention_mask` and `labels`, each int64 (T,); labels are -100 but at hidden tokens."""

    def __init__(self, dataset: MapStyle, *, mask: int, vocab_size: int, seed: int) -> None:
        """Hide tokens of `dataset`.

        Args:
            dataset: samples with `tokens` and `labels`; tokens whose label is -100 are padding.
            mask: id of the mask.
            vocab_size: ids a hidden token may become, 0 .. vocab_size - 1.
            seed: of the choice.
        """
        self.dataset = dataset
        self.mask = mask
        self.vocab_size = vocab_size
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Sample `index`: the same on every rank and in every call."""
        sample = self.dataset[index]
        tokens, valid = sample["tokens"], sample["labels"] != IGNORED_LABEL
        # Of torch's own CPU generator only 32 bits of the seed would count.
        generator = np.random.Generator(np.random.Philox(key=np.asarray([self.seed, index], np.uint64)))
        draws = torch.from_numpy(generator.random(len(tokens)))
        fate = torch.from_numpy(generator.random(len(tokens)))
        others = torch.from_numpy(generator.integers(self.vocab_size, size=len(tokens)))
        hidden = valid & (draws < _HIDDEN)
        shown = torch.where(hidden & (fate < _MASKED), self.mask, tokens)
        shown = torch.where(hidden & (fate >= 1 - _RANDOM), others, shown)
        return {
            "input_ids": shown,
            "attention_mask": valid.long(),
            "labels": tokens.masked_fill(~hidden, IGNORED_LABEL),
        }
