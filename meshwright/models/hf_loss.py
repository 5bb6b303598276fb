"""Losses of Hugging Face classes as (sum, count), from their logits and never from their own mean.

A transformers model divides by the labels of the batch that it sees, so its loss depends on how a batch is cut. These
functions take logits only, add up, and count. Knows no mesh; knows transformers by its calling convention alone.
Simplification: terms that a class adds to its loss besides cross-entropy (router balance of experts) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.models.loss import IGNORED_LABEL, summed_cross_entropy

Batch = Mapping[str, Tensor]


def causal_lm_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of the next token.

    Args:
        model: a causal language model of transformers.
        batch: our samples, `tokens` and `labels` int64 `(batch, sequence)` with labels already shifted by one; or
            transformers' own, `input_ids`, and where given `attention_mask` and unshifted `labels` (default: the
            tokens that the mask keeps); or `shift_labels`, those of the next token. `positions` of ours, or
            `position_ids` of theirs, where tokens are not counted from 0.

    Returns:
        The sum in nats and the number of labels that are not -100, as `language_model_loss`.
    """
    if "tokens" in batch:
        places = {"position_ids": torch.atleast_2d(batch["positions"])} if "positions" in batch else {}
        logits = model(input_ids=batch["tokens"], use_cache=False, **places).logits
        return summed_cross_entropy(logits, batch["labels"])
    labels = batch["shift_labels"] if "shift_labels" in batch else next_token_labels(batch)
    inputs = {key: value for key, value in batch.items() if key not in ("labels", "shift_labels")}
    return summed_cross_entropy(model(**inputs, use_cache=False).logits, labels)


def next_token_labels(batch: Batch) -> Tensor:
    """Labels of a batch of transformers, `(batch, sequence)`, each at the position that predicts it."""
    labels = batch.get("labels")
    if labels is None:
        labels = batch["input_ids"]
        if "attention_mask" in batch:
            labels = labels.masked_fill(batch["attention_mask"] == 0, IGNORED_LABEL)
    # The last position predicts nothing; padding the labels instead of cutting the logits saves a copy of them.
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def same_place_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of labels that stand where their logits do: masked tokens, or one class a sample.

    Args:
        model: a masked language model or a classifier of transformers.
        batch: `labels` int64, `(batch, sequence)` or `(batch,)`, -100 for what does not count; all else is passed on
            by name: `input_ids`, `attention_mask`, `token_type_ids`, `pixel_values`.

    Returns:
        As `causal_lm_loss`.
    """
    inputs = {key: value for key, value in batch.items() if key not in ("labels", "shift_labels")}
    return summed_cross_entropy(model(**inputs).logits, batch["labels"])


HF_LOSSES: Mapping[str, Callable[[Any, Batch], tuple[Tensor, Tensor]]] = MappingProxyType(
    {
        "causal_lm": causal_lm_loss,
        "masked_lm": same_place_loss,
        "sequence_classification": same_place_loss,
        "image_classification": same_place_loss,
    }
)
