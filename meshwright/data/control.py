"""A control for language models: does the model use the order of its context, or only frequencies?

The last label of each held-out sequence is predicted twice: from the sequence as it is, and with all tokens but the
newest in random order. A table of single bytes or pairs loses nothing by the shuffle; a model of language does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.data.batches import MapStyle
from meshwright.data.dataset import IGNORED_LABEL


class LastLabelOnly(Dataset[dict[str, Tensor]]):
    """Samples of `dataset` (tokens, labels) with every label but the last ignored.

    Args:
        dataset: language samples.
        shuffled: put all tokens but the newest in an order drawn from the sample's index.
    """

    def __init__(self, dataset: MapStyle, *, shuffled: bool) -> None:
        self.dataset = dataset
        self.shuffled = shuffled

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Sample `index`: the same on every rank and in every call."""
        sample = self.dataset[index]
        tokens, labels = sample["tokens"].clone(), torch.full_like(sample["labels"], IGNORED_LABEL)
        labels[-1] = sample["labels"][-1]
        if self.shuffled:
            order = torch.randperm(len(tokens) - 1, generator=torch.Generator().manual_seed(index))
            tokens[:-1] = tokens[:-1][order]
        return {"tokens": tokens, "labels": labels}
