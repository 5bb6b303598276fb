"""Attention of an unmodified module over a sequence that is cut over ranks: found by its call, computed over the group.

Owns how attention is found, and what is refused by name because it would silently see this rank's positions only. Must
not know batches or plans: `place` says what is cut and how. Attention over ranks is `context/`.

[Note: what is found] A `TorchFunctionMode` around forward and backward sees every call of torch's fused attention, in
any module, and of `described_attention`, which stands for models of transformers (`context_hf.py`). Other things that
look along the sequence are recognised where that is possible: attention written out (a softmax over queries x keys),
positions counted from 0, batch statistics. What else mixes positions, as a convolution over them, only `verify` sees.

Simplification: in a backward, what runs again belongs to the newest forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from meshwright.adapt.batch_norm import find_batch_norms
from meshwright.adapt.random_calls import OUTER_CALLS, attention_draw, module_path, seen_inside
from meshwright.comm.ops import Group
from meshwright.comm.rng import Draw
from meshwright.context.attend import attend, calls_of_attention
from meshwright.context.blocks import Attention, KeepWeights, default_scale
from meshwright.context.masks import AttentionMask
from meshwright.errors import PlanError
from meshwright.layout.sequence import CpKind, SequenceCut, SequenceRegion

_SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)


@dataclass(frozen=True)
class Kind:
    """Which attention a model asks for, as far as it says so in the call.

    Attributes:
        is_causal: queries see keys at and before them.
        window: see `AttentionMask`.
    """

    is_causal: bool
    window: int | None = None


@dataclass(frozen=True, eq=False)
class Place:
    """What the sequences of a micro-batch are.

    Attributes:
        cut: over the ranks.
        documents: see `AttentionMask`.
        valid: the same.
    """

    cut: SequenceCut
    documents: Tensor | None = None
    valid: Tensor | None = None


def described_attention(
    query: Tensor, key: Tensor, value: Tensor, kind: Kind, *, dropout_p: float, scale: float | None
) -> Tensor:
    """Attention whose mask is said in words; only inside of a `ContextScope`, which computes it (E255)."""
    if not has_torch_function((query, key, value)):
        raise PlanError(
            "E255",
            "plan.cp > 1: a model of transformers was called outside of model.step() and job.evaluate(), where nothing "
            "cuts its sequences. Call one of them, with a loss that returns (sum, count), or set plan.cp=1.",
        )
    return handle_torch_function(
        described_attention, (query, key, value), query, key, value, kind, dropout_p=dropout_p, scale=scale
    )


class ContextScope(TorchFunctionMode):
    """Computes attention over the ranks of a group; entered around every forward and backward.

    Args:
        group: the context-parallel ranks.
        kind: how they meet.

    Attributes:
        region: what dropout must know of the cut.
        num_calls: attention calls of the newest forward.
        declared: operations over the group that all calls so far stand for, backward included.
    """

    def __init__(self, group: Group, kind: CpKind) -> None:
        super().__init__()
        self.group = group
        self.kind: CpKind = kind
        self.region = SequenceRegion(group.index)
        self.num_calls = 0
        self.declared = Counter[str]()
        self._is_forward = False
        self._place: Place | None = None
        self._is_on = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """On inside; nothing happens where it is on already."""
        if self._is_on:
            yield
            return
        self._is_on = True
        try:
            with self:
                yield
        finally:
            self._is_on = False

    @contextmanager
    def forward(self, place: Place, *, is_whole: bool = True) -> Iterator[None]:
        """Around a forward over sequences that are cut so; `is_whole`: of a whole model, which has attention.

        Raises:
            PlanError: E250 for attention that is refused, E254 for what would see this rank's positions only.
        """
        self.num_calls = 0
        self._is_forward = True
        try:
            with self.backward(place):
                yield
        finally:
            self._is_forward = False
        if is_whole and not self.num_calls:
            raise no_attention(self.group.size)

    @contextmanager
    def backward(self, place: Place) -> Iterator[None]:
        """Around what runs of such sequences again, where other forwards may have been between."""
        self._place, self.region.cut = place, place.cut
        with self.entered():
            yield

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._fused(*args, **kwargs)
        if func is described_attention:
            return self._attend(*args, **kwargs)
        if func in OUTER_CALLS:
            return seen_inside(func)(self, *args, **kwargs)
        if self._is_forward and func in _SOFTMAXES:
            self._check_softmax(args[0] if args else kwargs["input"])
        elif self._is_forward and func is torch.arange:
            self._check_positions(*args, **kwargs)
        return func(*args, **kwargs)

    @property
    def _local_length(self) -> int:
        return 0 if self._place is None else self._place.cut.local_length

    def _fused(  # noqa: PLR0913 - torch's own parameters
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise self._refused(
                f"a mask of shape {tuple(attn_mask.shape)}, which was made from this rank's positions"
            )
        if not enable_gqa:
            lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
            query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
        return self._attend(query, key, value, Kind(is_causal), dropout_p=dropout_p, scale=scale)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, kind: Kind, *, dropout_p: float, scale: float | None
    ) -> Tensor:
        place = self._checked_place(query, key)
        if query.dim() == 3:  # one head
            one = (query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1))
            return self._attend(*one, kind, dropout_p=dropout_p, scale=scale).squeeze(1)
        self._count(query, key)
        device = query.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        mask = AttentionMask(
            is_causal=kind.is_causal, window=kind.window, documents=place.documents, valid=place.valid
        )
        call = Attention(mask, place.cut.length, default_scale(query, scale), self._keep(query, dropout_p))
        return attend(query, key, value, call=call, cut=place.cut, group=self.group, kind=self.kind)

    def _count(self, query: Tensor, key: Tensor) -> None:
        self.num_calls += 1
        forward, backward = calls_of_attention(
            self.kind, self.group.size, num_heads=query.shape[1], num_kv_heads=key.shape[1]
        )
        self.declared += forward
        # What runs again in a backward has one backward, that of its first run.
        if self._is_forward and torch.is_grad_enabled():
            self.declared += backward

    def _keep(self, query: Tensor, dropout_p: float) -> KeepWeights | None:
        """Dropout of the weights by their global places: the masks of one device."""
        if not 0 < dropout_p <= 1:
            return None
        assert self._place is not None, "attention outside of a forward"
        batch, heads, length = *query.shape[:2], self._place.cut.length
        draw = attention_draw(query, (batch, heads, length, length), dropout_p)
        return _Keep(draw, batch, heads, length, torch.promote_types(query.dtype, torch.float32))

    def _checked_place(self, query: Tensor, key: Tensor) -> Place:
        place, length = self._place, self._local_length
        if place is None or query.dim() not in (3, 4) or {query.shape[-2], key.shape[-2]} != {length}:
            raise self._refused(
                f"queries of shape {tuple(query.shape)} to keys of shape {tuple(key.shape)}, and each rank holds "
                f"{length} positions of both"
            )
        return place

    def _check_softmax(self, x: Tensor) -> None:
        length = self._local_length
        if length > 1 and x.dim() >= 4 and x.shape[-1] == x.shape[-2] == length:
            raise self._local(f"a softmax over scores of shape {tuple(x.shape)}, attention written out,")

    def _check_positions(self, *args: Any, **kwargs: Any) -> None:
        numbers = [kwargs.get("start"), kwargs.get("end"), kwargs.get("step")]
        given = list(args)
        if len(given) == 1:
            numbers[1] = given[0]
        else:
            numbers[: len(given)] = given
        start, end, step = numbers
        if start in (None, 0) and step in (None, 1) and end == self._local_length > 1:
            raise self._local(f"torch.arange({end}), positions counted from 0,")

    def _refused(self, what: str) -> PlanError:
        return PlanError(
            "E250",
            f"plan.cp = {self.group.size}: attention in {module_path()} has {what}. Built: causal and full attention, "
            f"windows of transformers models, documents by position_ids, padding by attention_mask. Set plan.cp=1.",
        )

    def _local(self, what: str) -> PlanError:
        return PlanError(
            "E254",
            f"plan.cp = {self.group.size}: {what} in {module_path()} would see this rank's part of the sequence only. "
            f"Call torch's scaled_dot_product_attention, take positions from batch['positions'], or set plan.cp=1.",
        )


@dataclass(frozen=True, eq=False)
class _Keep:
    """See `KeepWeights`; `draw` is over the weights `(batch, heads, length, length)` of the whole sequence."""

    draw: Draw
    batch: int
    heads: int
    length: int
    dtype: torch.dtype

    def __call__(self, heads: slice, queries: Tensor, keys: Tensor) -> Tensor:
        device, last = queries.device, self.length - 1
        samples = torch.arange(self.batch, device=device)[:, None, None, None] * self.heads
        rows = samples + torch.arange(heads.start, heads.stop, device=device)[:, None, None]
        rows = rows * self.length + queries.clamp(max=last)[:, None]
        kept = self.draw.keep_at(rows * self.length + keys.clamp(max=last))
        return kept.to(self.dtype).mul_(self.draw.scale)


def no_attention(num_ranks: int) -> PlanError:
    """E254."""
    return PlanError(
        "E254",
        f"plan.cp = {num_ranks}: no attention was seen in the forward. It must call torch's "
        f"scaled_dot_product_attention, or be a model of transformers. Set plan.cp=1.",
    )


def check_model(model: nn.Module, num_ranks: int) -> None:
    """Raise E254 for layers whose statistics would be taken over positions of one rank, padding among them."""
    norms = find_batch_norms(model)
    if norms:
        raise PlanError(
            "E254",
            f"plan.cp = {num_ranks}: {type(model).__name__} has batch normalisation ({len(norms)} layers), whose "
            f"statistics would count padding. Set plan.cp=1.",
        )


def in_context(scope: ContextScope, randomness: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    """`TrainState.randomness` with `scope` on inside it, so that what runs again in a backward meets it too."""

    @contextmanager
    def both(step: int, microbatch: int) -> Iterator[None]:
        with randomness(step, microbatch), scope.entered():
            yield

    return both
