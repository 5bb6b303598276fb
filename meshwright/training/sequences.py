"""Where sequences are cut for context parallelism: a micro-batch that all ranks of a group read, and this rank's part.

Owns which tensors of a batch have a sequence, what is padded with what, and that labels are shifted before the cut.
Must not know attention. A batch is a mapping with `tokens` or `input_ids`, int64 `(batch, sequence)`; every tensor
whose second dim is that long is cut along it, all else stays whole. The loss then sees, besides:

| key | what |
|---|---|
| `positions` | of our tokens in the whole sequence, `(local,)`; or `(batch, local)`, a part of those that were given |
| `position_ids` | the same for `input_ids`, always of two dims |
| `shift_labels` | for `input_ids`: the label of the next token, from the whole sequence |

`attention_mask` and `position_ids` become data of the mask: padding, and documents where positions begin anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.adapt.context_parallel import ContextScope, Place
from meshwright.context.blocks import positions_of
from meshwright.errors import PlanError
from meshwright.layout.sequence import CpKind, SequenceCut, cut_sequence, padding
from meshwright.models.hf_loss import next_token_labels
from meshwright.models.loss import IGNORED_LABEL
from meshwright.pipeline.part import Part
from meshwright.training.step import Loss

_TOKENS = ("tokens", "input_ids")


def over_sequences(loss: Loss, scope: ContextScope) -> Loss:
    """`loss` on this rank's part of each sequence, in a model whose attention sees the whole of it.

    Args:
        loss: (model, batch) -> (sum, count) over positions.
        scope: computes attention over the ranks.

    Raises, when called:
        PlanError: E251 for a batch or a loss that cannot be cut; see `ContextScope.forward`.
    """

    def on_part(model: Any, batch: Any) -> tuple[Tensor, Any]:
        length = length_of(batch)
        cut = cut_sequence(length, scope.group.size, scope.kind)
        part, place = cut_batch(batch, cut, scope.group.index)
        with scope.forward(place):
            found = loss(model, part)
        if not isinstance(found, tuple) or len(found) != 2:
            raise PlanError(
                "E251",
                f"plan.cp cuts sequences, and the loss returned {type(found).__name__}: a mean over a part of a "
                f"sequence is none over the whole. Return (sum, count) over positions, or set plan.cp=1.",
            )
        total, count = found
        _check_count(part, count)
        return total, count

    return on_part


def cutter(scope: ContextScope) -> Callable[[Any], Part]:
    """For a model in stages, of which some may have no attention: a batch -> this rank's part of its sequences."""

    def cut(batch: Any) -> Part:
        found = cut_sequence(length_of(batch), scope.group.size, scope.kind)
        part, place = cut_batch(batch, found, scope.group.index)
        return Part(
            part,
            forward=lambda: scope.forward(place, is_whole=False),
            backward=lambda: scope.backward(place),
            check_count=lambda count: _check_count(part, count),
        )

    return cut


def cut_batch(batch: Mapping[str, Any], cut: SequenceCut, index: int) -> tuple[dict[str, Any], Place]:
    """Rank `index`'s part of a batch, and what its attention must know of the whole; see the module.

    Raises:
        PlanError: E251 for labels that are not one a position.
    """
    tokens = batch[_key(batch)]
    valid = batch.get("attention_mask")
    if valid is not None:
        _check_mask(valid, tokens)
        valid = None if bool(valid.bool().all()) else valid.bool()
    batch = _shifted(batch, cut.length)
    given = batch.get("position_ids", batch.get("positions"))
    documents = None if given is None or valid is not None else _documents(given.expand_as(tokens))
    here = positions_of(cut.runs(index), tokens.device)
    # Padding has the last position's place: tables end there, and it is never valid.
    known = here.clamp(max=cut.length - 1)
    places = known if given is None else given[..., known]
    part = {
        name: _part(value, here, cut.length, fill=IGNORED_LABEL if "labels" in name else 0)
        for name, value in batch.items()
        if name not in ("attention_mask", "position_ids", "positions")
    }
    if "input_ids" in batch:
        part["position_ids"] = torch.atleast_2d(places)
    else:
        part["positions"] = places
    return part, Place(cut, documents, valid)


def _key(batch: Any) -> str:
    if isinstance(batch, Mapping):
        for key in _TOKENS:
            if isinstance(batch.get(key), Tensor) and batch[key].dim() == 2:
                return key
    keys = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
    raise PlanError(
        "E251",
        f"plan.cp cuts sequences, and a batch ({keys}) has none: it must be a mapping with tokens or input_ids, "
        f"(batch, sequence), and a label a position. Set plan.cp=1.",
    )


def length_of(batch: Any) -> int:
    """Positions of each sequence of a batch."""
    return int(batch[_key(batch)].shape[1])


def _shifted(batch: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The batch with labels that belong to positions; transformers' own are shifted here, before the cut."""
    found = dict(batch)
    labels = batch.get("labels")
    if labels is not None and (labels.dim() != 2 or labels.shape[1] != length):
        raise PlanError(
            "E251",
            f"plan.cp cuts sequences of {length} positions, and labels have shape {tuple(labels.shape)}: a loss over "
            f"whole sequences needs them on one rank. Set plan.cp=1.",
        )
    if "tokens" not in batch:
        found["shift_labels"] = next_token_labels(batch)
    return found


def _check_mask(valid: Tensor, tokens: Tensor) -> None:
    if valid.shape != tokens.shape:
        raise PlanError(
            "E250",
            f"plan.cp > 1: an attention_mask of shape {tuple(valid.shape)} for tokens of shape {tuple(tokens.shape)} "
            f"is not built over ranks; padding is, (batch, sequence). Set plan.cp=1.",
        )


def _documents(positions: Tensor) -> Tensor | None:
    """Number of the document of each position: one begins where positions do not go on; None: one a sequence."""
    begins = positions[:, 1:] != positions[:, :-1] + 1
    numbers = F.pad(begins.cumsum(1), (1, 0))
    return numbers if bool(begins.any()) else None


def _part(value: Any, here: Tensor, length: int, *, fill: int) -> Any:
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != length:
        return value
    missing = int(here.max()) + 1 - length
    if missing > 0:
        value = F.pad(value, (0, 0) * (value.dim() - 2) + (0, missing), value=fill)
    return value[:, here]


def _check_count(part: Mapping[str, Any], count: Any) -> None:
    """Raise E251 for a loss that shifts the labels once more, inside of a slice."""
    labels = part.get("labels")
    if labels is None:
        return
    known = [int((part[name] != IGNORED_LABEL).sum()) for name in ("labels", "shift_labels") if name in part]
    counted, all_of_them = int(count), known[0]
    shifted = int((labels[:, 1:] != IGNORED_LABEL).sum())
    if counted == shifted and counted not in known:
        raise PlanError(
            "E251",
            f"the loss counted {counted} of {all_of_them} labels of this rank's positions: it shifts them, and loses "
            f"the first of every slice. Give labels that are shifted already, or read batch['shift_labels'].",
        )


def padding_warning(length: int, num_ranks: int, kind: CpKind) -> str | None:
    """W204 where sequences of `length` get padding."""
    number = padding(length, num_ranks, kind)
    if not number:
        return None
    return (
        f"W204 cp={num_ranks} pads seq_len {length:,} to {length + number:,} ({number} padded tokens a sequence, never "
        f"counted as valid)"
    )
