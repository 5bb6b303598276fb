"""Losses as (sum, count): the caller divides once by the count of the whole global batch.

Knows no mesh and does not divide.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# A label that takes no part in the loss.
IGNORED_LABEL = -100


def language_model_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of the next token.

    Args:
        model: maps tokens `(batch, sequence)` to logits `(batch, sequence, vocabulary)`.
        batch: `tokens` and `labels`, both int64 `(batch, sequence)`; labels are already shifted by one, and
            `IGNORED_LABEL` marks positions that do not count; and `positions`, where tokens are not counted from 0.

    Returns:
        The sum in nats, a scalar of at least float32, and the number of labels that count, an int64 scalar.
    """
    places = (batch["positions"],) if "positions" in batch else ()
    return summed_cross_entropy(model(batch["tokens"], *places), batch["labels"])


def classification_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of the class.

    Args:
        model: maps inputs `(batch, features)` to logits `(batch, classes)`.
        batch: `inputs`, and `labels` int64 `(batch,)`, `IGNORED_LABEL` for samples that do not count.

    Returns:
        As `language_model_loss`.
    """
    return summed_cross_entropy(model(batch["inputs"]), batch["labels"])


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over labels that are not ignored, in at least float32, and their number.

    Args:
        logits: `(..., classes)`.
        labels: int64 `(...)`.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL
    )
    return total, (labels != IGNORED_LABEL).sum()
