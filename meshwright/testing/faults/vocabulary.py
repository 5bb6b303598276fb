"""Silent faults of a vocabulary that is cut over ranks: the head that shares its table, and the sum of exponentials."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshwright.adapt.cut_logits import CutLogits
from meshwright.comm import autograd
from meshwright.models.loss import IGNORED_LABEL
from meshwright.tensor import vocabulary
from meshwright.testing.faults.patching import is_step, with_weight
from meshwright.testing.faults.places import anywhere, layout_of, tensor_fault, tied_parameters
from meshwright.testing.faults.silent import Place, Site
from meshwright.verification.rank import CandidateRank

Loss = Callable[[CutLogits, Tensor], Tensor]


def _tied_heads(candidate: CandidateRank) -> list[Place]:
    """Heads whose weight is the table of an embedding; `verify` names the table, or the head's output."""
    places = tied_parameters(candidate)
    return [anywhere(candidate, p.name.rpartition(".")[0], *_with_modules(p.tensors)) for p in places]


def _with_modules(names: tuple[str, ...]) -> tuple[str, ...]:
    return (*names, names[-1].rpartition(".")[0])


def _use_lost(candidate: CandidateRank, site: Site) -> None:
    head = candidate.engine.model.get_submodule(site.place.name)
    with_weight(head, lambda weight: weight.detach(), lambda: is_step(candidate, site))


def _rows_of_another_cut(candidate: CandidateRank, site: Site) -> None:
    head = candidate.engine.model.get_submodule(site.place.name)
    with_weight(head, lambda weight: weight.roll(1, 0), lambda: is_step(candidate, site))


class _WithLoss(TorchFunctionMode):
    """Cross-entropies of cut logits inside are `loss`."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self._loss = loss

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.cross_entropy and isinstance(args[0], CutLogits):
            return self._loss(args[0], args[1])
        return func(*args, **(kwargs or {}))


def _with_loss(candidate: CandidateRank, site: Site, loss: Loss) -> None:
    plain = candidate.loss

    def changed(model: Any, batch: Any) -> tuple[Tensor, Any]:
        if not is_step(candidate, site):
            return plain(model, batch)
        with _WithLoss(loss):
            return plain(model, batch)

    candidate.loss = changed


def _padding_counts(candidate: CandidateRank, site: Site) -> None:
    def padded(logits: CutLogits, labels: Tensor) -> Tensor:
        sizes, index = logits.sizes, logits.group.index
        return vocabulary.summed_cross_entropy(
            F.pad(logits.local, (0, max(sizes) - sizes[index])),
            labels,
            logits.group,
            first=sum(sizes[:index]),
            vocab_size=sum(sizes),
            cause=logits.cause,
        )

    _with_loss(candidate, site, padded)


def _own_part_only(candidate: CandidateRank, site: Site) -> None:
    def own(logits: CutLogits, labels: Tensor) -> Tensor:
        local = labels - sum(logits.sizes[: logits.group.index])
        elsewhere = (local < 0) | (local >= logits.local.shape[-1])
        mine = local.masked_fill(elsewhere, IGNORED_LABEL)
        total = F.cross_entropy(logits.local, mine, reduction="sum", ignore_index=IGNORED_LABEL)
        return autograd.reduce(total, logits.group, cause=logits.cause)

    _with_loss(candidate, site, own)


def _heads(candidate: CandidateRank) -> list[Place]:
    """Everywhere, where some ranks have fewer rows of the vocabulary than others."""
    cuts = layout_of(candidate).cuts.values()
    return [anywhere(candidate, "")] if any(cut.dim == 0 and len(set(cut.sizes)) > 1 for cut in cuts) else []


FAULTS = (
    tensor_fault(
        "use_of_tied_head_lost",
        "the table of embeddings gets the gradient of the lookup alone, not that of the head that shares it",
        "NVIDIA/Megatron-LM#844",
        ("gradients",),
        (_use_lost, _tied_heads),
        "ties",
    ),
    tensor_fault(
        "tied_head_cut_elsewhere",
        "the head takes the rows of its shared table as if they were cut at another id than for the lookup",
        "foundation-model-stack/foundation-model-stack#331",
        ("activations", "loss"),
        (_rows_of_another_cut, _tied_heads),
        "ties",
    ),
    tensor_fault(
        "padded_vocabulary_counts",
        "ranks with a smaller part of the vocabulary are padded, and padded logits enter the sum of exponentials",
        "NVIDIA/Megatron-LM#1754",
        ("loss", "gradients"),
        (_padding_counts, _heads),
    ),
    tensor_fault(
        "softmax_of_own_vocabulary",
        "each rank divides by the sum of exponentials of its own part of the vocabulary",
        "NVIDIA/Megatron-LM#7452",
        ("loss", "gradients"),
        (_own_part_only, _heads),
    ),
)
