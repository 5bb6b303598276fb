"""Embedding and cross-entropy with the vocabulary cut over ranks: no rank ever has all logits.

Each rank has the rows [first, first + n) of the table and of the head. A looked-up row comes from the one rank that has
it, by one all-reduce. Of the logits every rank needs four numbers a token from each other one (its largest logit, its
sum of exponentials, its logit of the label, its sum of logits): one all-gather of 4 x tokens numbers forward, in which
ranks are combined in order, and nothing backward, since a rank's logits have their gradient at hand.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3; the z-loss of Chowdhery et al. 2022 (arXiv 2204.02311),
section 5. Chunks may differ in size and may be empty: nothing is padded, so no padded logit can enter a sum.
Must not know models; the sum is not divided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.comm import autograd, ops
from meshwright.comm.ops import Group


def embedding(tokens: Tensor, weight: Tensor, group: Group, *, first: int, cause: str) -> Tensor:
    """Rows of a table that is cut by rows: `(..., dim)` for tokens int64 `(...)`, the same on every rank.

    Args:
        tokens: ids of the whole vocabulary.
        weight: this rank's rows, `(n, dim)`.
        group: the ranks.
        first: id of this rank's first row.
        cause: for the log.
    """
    local = tokens - first
    elsewhere = (local < 0) | (local >= weight.shape[0])
    if not weight.shape[0]:
        rows = weight.sum() + weight.new_zeros((*tokens.shape, weight.shape[1]))
    else:
        rows = F.embedding(local.masked_fill(elsewhere, 0), weight)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
    return autograd.reduce(rows, group, cause=cause)


@dataclass(frozen=True)
class LossTerms:
    """What a cross-entropy adds to the negative log-probability of the label.

    Attributes:
        ignore_index: label of tokens that do not count.
        label_smoothing: part of the target that is spread evenly over the whole vocabulary.
        z_loss: factor of the squared logarithm of the sum of exponentials.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0


_PLAIN = LossTerms()


def summed_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: Group,
    *,
    first: int,
    vocab_size: int,
    terms: LossTerms = _PLAIN,
    cause: str,
) -> Tensor:
    """Sum over counted tokens of -(1 - s)·log p[label] - s·mean of log p + z·(log Z)², the same on every rank.

    Args:
        logits: this rank's chunk `(..., n)`; 16-bit ones are summed in float32.
        labels: int64 `(...)`, ids of the whole vocabulary.
        group: the ranks.
        first: id of this rank's first logit.
        vocab_size: logits of all ranks together.
        terms: smoothing, z-loss and the ignored label.
        cause: for the log.
    """
    rows = logits.flatten(0, -2)
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return _CrossEntropy.apply(wide, labels.flatten(), group, (first, vocab_size, terms), cause)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: Group, where: tuple[int, int, LossTerms], cause: str
    ) -> Tensor:
        first, vocab_size, terms = where
        counted = labels != terms.ignore_index
        local = labels - first
        mine = counted & (local >= 0) & (local < logits.shape[1])
        place = local.masked_fill(~mine, 0)
        chosen = logits.gather(1, place[:, None])[:, 0] * mine if logits.shape[1] else logits.sum(1)
        log_z, label_logit, total = _combined(logits, chosen, group, cause)
        smooth = terms.label_smoothing
        loss = (
            log_z - (1 - smooth) * label_logit - smooth / vocab_size * total + terms.z_loss * log_z.square()
        )
        ctx.save_for_backward(logits, log_z, place, mine, counted)
        ctx.terms, ctx.vocab_size = terms, vocab_size
        return loss[counted].sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_z, place, mine, counted = ctx.saved_tensors
        terms = ctx.terms
        gradient = (logits - log_z[:, None]).exp_()
        gradient.mul_((1 + 2 * terms.z_loss * log_z)[:, None]).sub_(terms.label_smoothing / ctx.vocab_size)
        if logits.shape[1]:
            gradient.scatter_add_(
                1, place[:, None], -(1 - terms.label_smoothing) * mine.to(logits.dtype)[:, None]
            )
        # An ignored token may have logits that are no numbers: zero them, do not multiply by zero.
        gradient = gradient.masked_fill_(~counted[:, None], 0.0).mul_(grads[0])
        return gradient, None, None, None, None


def _combined(logits: Tensor, chosen: Tensor, group: Group, cause: str) -> tuple[Tensor, Tensor, Tensor]:
    """log of the sum of exponentials, the label's logit and the sum of logits, of the whole vocabulary, `(tokens,)`."""
    if logits.shape[1]:
        largest = logits.amax(1)
        exponentials = (logits - largest[:, None]).exp().sum(1)
    else:
        largest, exponentials = torch.full_like(chosen, -torch.inf), torch.zeros_like(chosen)
    mine = torch.stack((largest, exponentials, chosen, logits.sum(1)))
    every = mine.new_empty((group.size, *mine.shape))
    ops.all_gather(every.view(-1), mine.view(-1), group, cause=cause).wait()
    largest, exponentials, chosen, sums = every.unbind(1)
    top = largest.amax(0)
    log_z = top + ((largest - top).exp() * exponentials).sum(0).log()
    return log_z, chosen.sum(0), sums.sum(0)
