"""Silent faults of context parallelism: labels, positions, masks, blocks of keys, their gradients, dropout, counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.adapt.context_parallel import ContextScope, Place
from meshwright.comm.transports.base import Transport, Work
from meshwright.layout.sequence import SequenceCut
from meshwright.models.loss import IGNORED_LABEL
from meshwright.testing.faults.patching import Method, patch
from meshwright.testing.faults.silent import SilentFault, Site
from meshwright.training.sequences import over_sequences
from meshwright.verification.rank import CandidateRank

# Tags of a ring's messages, as `context/ring.py` has them.
_KEYS, _GRADIENTS = 0, 1


def _scope(candidate: CandidateRank) -> ContextScope:
    assert candidate.context is not None, "sequences are not cut"
    return candidate.context


def _transport(candidate: CandidateRank) -> Transport:
    transport = _scope(candidate).group.transport
    assert transport is not None, "sequences are not cut"
    return transport


def _change_part(
    candidate: CandidateRank, change: Callable[[dict[str, Any], SequenceCut], dict[str, Any]]
) -> None:
    """Let the loss see what `change` makes of this rank's part of a batch."""
    scope, plain = _scope(candidate), candidate.loss_of_part

    def changed(model: Any, part: Any) -> tuple[Tensor, Any]:
        assert scope.region.cut is not None, "a forward has a cut"
        return plain(model, change(dict(part), scope.region.cut))

    candidate.loss = over_sequences(changed, scope)


# Batches.


def _labels_shifted_before_the_cut(candidate: CandidateRank, _site: Site) -> None:
    plain = candidate.loss

    def again(model: Any, batch: Any) -> tuple[Tensor, Any]:
        labels = torch.full_like(batch["labels"], IGNORED_LABEL)
        labels[:, :-1] = batch["labels"][:, 1:]
        return plain(model, {**batch, "labels": labels})

    candidate.loss = again


def _positions_of_the_rank(candidate: CandidateRank, _site: Site) -> None:
    def count(part: dict[str, Any], cut: SequenceCut) -> dict[str, Any]:
        return part | {"positions": torch.arange(1, cut.local_length + 1) - 1}

    _change_part(candidate, count)


def _padding_is_valid(candidate: CandidateRank, _site: Site) -> None:
    index = _scope(candidate).group.index

    def fill(part: dict[str, Any], cut: SequenceCut) -> dict[str, Any]:
        places = [place for start, stop in cut.runs(index) for place in range(start, stop)]
        is_padding = torch.tensor([place >= cut.length for place in places])
        return part | {"labels": part["labels"].masked_fill(is_padding, 0)}

    _change_part(candidate, fill)


def _count_of_whole_sequences(candidate: CandidateRank, _site: Site) -> None:
    plain = candidate.loss

    def counted(model: Any, batch: Any) -> tuple[Tensor, Any]:
        return plain(model, batch)[0], (batch["labels"] != IGNORED_LABEL).sum()

    candidate.loss = counted


# Masks.


def _change_place(candidate: CandidateRank, change: Callable[[Place], Place]) -> None:
    def make(forward: Method) -> Method:
        def changed(place: Place) -> AbstractContextManager[None]:
            return forward(change(place))

        return changed

    patch(_scope(candidate), "forward", make)


def _change_kind(candidate: CandidateRank, **changes: Any) -> None:
    def make(attend: Method) -> Method:
        def changed(query: Tensor, key: Tensor, value: Tensor, kind: Any, **others: Any) -> Tensor:
            return attend(query, key, value, replace(kind, **changes), **others)

        return changed

    patch(_scope(candidate), "_attend", make)


def _mask_of_the_slice_dropped(candidate: CandidateRank, _site: Site) -> None:
    _change_kind(candidate, is_causal=False)


def _window_dropped(candidate: CandidateRank, _site: Site) -> None:
    _change_kind(candidate, window=None)


def _documents_dropped(candidate: CandidateRank, _site: Site) -> None:
    _change_place(candidate, lambda place: replace(place, documents=None))


def _order_mistaken(candidate: CandidateRank, _site: Site) -> None:
    def change(place: Place) -> Place:
        each, cut = len(place.cut.chunks[0]), place.cut
        plain = tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(cut.size))
        return replace(place, cut=replace(cut, chunks=plain))

    _change_place(candidate, change)


def _dropout_of_another_slice(candidate: CandidateRank, _site: Site) -> None:
    region = _scope(candidate).region
    region.index = (region.index + 1) % _scope(candidate).group.size


# What travels.


def _gradients_not_sent_home(candidate: CandidateRank, _site: Site) -> None:
    def make(send: Method) -> Method:
        def empty(tensor: Tensor, index: int, tag: int) -> Work:
            return send(torch.zeros_like(tensor) if tag == _GRADIENTS else tensor, index, tag)

        return empty

    patch(_transport(candidate), "send", make)


class _OwnBlock:
    """A receive in backward that leaves this rank's own block in place of the one that came."""

    def __init__(self, work: Work, into: Tensor, own: list[Tensor]) -> None:
        self._work, self._into, self._own = work, into, own

    def wait(self) -> None:
        self._work.wait()
        self._into.copy_(self._own[0])


def _backward_reuses_the_first_block(candidate: CandidateRank, _site: Site) -> None:
    sent: list[Tensor] = []

    def make_send(send: Method) -> Method:
        def noted(tensor: Tensor, index: int, tag: int) -> Work:
            if tag == _KEYS:
                sent[:] = [tensor]
            return send(tensor, index, tag)

        return noted

    def make_receive(receive: Method) -> Method:
        def reused(tensor: Tensor, index: int, tag: int) -> Any:
            work = receive(tensor, index, tag)
            in_backward = torch._C._current_graph_task_id() != -1
            return _OwnBlock(work, tensor, sent) if tag == _KEYS and in_backward else work

        return reused

    patch(_transport(candidate), "send", make_send)
    patch(_transport(candidate), "receive", make_receive)


def _heads_in_another_order(candidate: CandidateRank, _site: Site) -> None:
    def make(all_to_all: Method) -> Method:
        def rolled(output: Tensor, source: Tensor) -> Work:
            work = all_to_all(output, source)

            def roll() -> None:
                output.copy_(output.roll(1, 0))

            return Work([work], roll)

        return rolled

    patch(_transport(candidate), "all_to_all", make)


_CUT = ("2 ranks", "cut sequences")
FAULTS = (
    SilentFault(
        name="labels_shifted_before_the_cut",
        theme="context parallel",
        description="labels that are shifted already are shifted once more before the cut",
        source="modelscope/ms-swift#9977",
        expected=("loss",),
        inject=_labels_shifted_before_the_cut,
        needs=(*_CUT, "our batches"),
    ),
    SilentFault(
        name="positions_of_the_rank",
        theme="context parallel",
        description="every rank counts the positions of its slice from 0",
        source="PrimeIntellect-ai/prime-rl#1511",
        expected=("activations",),
        inject=_positions_of_the_rank,
        needs=(*_CUT, "our batches"),
    ),
    SilentFault(
        name="padding_is_valid",
        theme="context parallel",
        description="padding behind the sequence has labels that count",
        source="pytorch/torchtitan#3257",
        expected=("loss",),
        inject=_padding_is_valid,
        needs=(*_CUT, "our batches", "padding"),
    ),
    SilentFault(
        name="count_of_whole_sequences",
        theme="context parallel",
        description="each rank counts the labels of whole sequences: the global count is cp times too large",
        source="pytorch/torchtitan#3257",
        expected=("loss",),
        inject=_count_of_whole_sequences,
        needs=(*_CUT, "our batches"),
    ),
    SilentFault(
        name="mask_over_ranks_dropped",
        theme="context parallel",
        description="the causal mask is lost where keys come from other ranks",
        source="huggingface/accelerate#4177",
        expected=("activations",),
        inject=_mask_of_the_slice_dropped,
        needs=(*_CUT, "causal attention"),
    ),
    SilentFault(
        name="window_dropped",
        theme="context parallel",
        description="a sliding window is lost, and attention is plainly causal",
        source="huggingface/accelerate#4177",
        expected=("activations",),
        inject=_window_dropped,
        needs=(*_CUT, "windows"),
    ),
    SilentFault(
        name="documents_dropped",
        theme="context parallel",
        description="packed documents attend to each other",
        source="huggingface/trl#6843",
        expected=("activations",),
        inject=_documents_dropped,
        needs=(*_CUT, "documents"),
    ),
    SilentFault(
        name="order_mistaken",
        theme="context parallel",
        description="sequences are cut in zigzag order, and attention takes them for consecutive",
        source="pytorch/pytorch#141429",
        expected=("activations",),
        inject=_order_mistaken,
        needs=(*_CUT, "causal attention", "zigzag"),
    ),
    SilentFault(
        name="dropout_of_another_slice",
        theme="context parallel",
        description="dropout masks are those of the positions of another rank",
        source="NVIDIA/Megatron-LM#1464",
        expected=("activations",),
        inject=_dropout_of_another_slice,
        needs=(*_CUT, "dropout"),
    ),
    SilentFault(
        name="gradients_not_sent_home",
        theme="context parallel",
        description="gradients of keys and values that other ranks computed never come home",
        source="NVIDIA/Megatron-LM#1465",
        expected=("gradients",),
        inject=_gradients_not_sent_home,
        needs=(*_CUT, "ring"),
    ),
    SilentFault(
        name="backward_reuses_the_first_block",
        theme="context parallel",
        description="backward uses the rank's own keys and values for every block of the ring",
        source="huggingface/diffusers#14265",
        expected=("gradients",),
        inject=_backward_reuses_the_first_block,
        needs=(*_CUT, "ring"),
    ),
    SilentFault(
        name="heads_in_another_order",
        theme="context parallel",
        description="what an exchange of heads brings is put together in another order of ranks",
        source="feifeibear/long-context-attention#4",
        expected=("activations",),
        inject=_heads_in_another_order,
        needs=(*_CUT, "exchanged heads"),
    ),
)
