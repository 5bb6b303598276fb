"""Attention of this rank's queries to keys of some runs of positions: which blocks are computed, and their merging.

Owns the list of blocks for a mask, the running output and its log-sum-exp, and the backward over the same blocks. Must
not know ranks: keys of any rank come here with their positions.

[Note: merging] Two outputs of the same queries over different keys, each with its log-sum-exp, become one: weights
exp(lse - both) with both = log(exp(lse1) + exp(lse2)). The larger of the two is taken out of the exponentials, so that
scores of any size are safe, and queries that saw nothing yet (-inf) stay so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.context.kernels import Block, Kernel, choose_kernel
from meshwright.context.masks import AttentionMask
from meshwright.layout.sequence import Run

# Queries of a block whose mask is written out: the kernel is busy with them, and a window still leaves keys out.
_MASKED_QUERIES = 512

# (heads of this rank, positions of queries, of keys) -> what multiplies the weights `(batch, heads, queries, keys)`
KeepWeights = Callable[[slice, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Attention:
    """One call of attention, besides its tensors.

    Attributes:
        mask: over positions of the whole sequence.
        length: positions that exist; keys at and behind it are padding.
        scale: of the scores.
        keep: dropout, or None.
    """

    mask: AttentionMask
    length: int
    scale: float
    keep: KeepWeights | None = None


@dataclass(frozen=True)
class Piece:
    """A block of scores: slices of this rank's queries and of the keys at hand, and how they are masked."""

    queries: slice
    keys: slice
    kind: str  # "full", "causal" or "masked"


def pieces(call: Attention, queries: Sequence[Run], keys: Sequence[Run]) -> list[Piece]:
    """The blocks in which something counts.

    Args:
        call: its mask.
        queries: runs of positions of the queries, in the order in which they lie.
        keys: the same of the keys.
    """
    # Under a causal mask alone padding, which lies at the end, is seen by padding only.
    is_plain = call.mask.is_plain_causal
    known = keys if is_plain else [(low, min(high, call.length)) for low, high in keys]
    if is_plain and tuple(queries) == tuple(keys):
        total = sum(stop - start for start, stop in queries)
        return [Piece(slice(0, total), slice(0, total), "causal")]
    found: list[Piece] = []
    place = 0
    for start, stop in queries:
        found += _pieces_of_run(call.mask, (start, stop), place, keys, known)
        place += stop - start
    return _joined(found)


def _pieces_of_run(
    mask: AttentionMask, run: Run, place: int, keys: Sequence[Run], known: Sequence[Run]
) -> list[Piece]:
    found: list[Piece] = []
    start, stop = run
    here = slice(place, place + stop - start)
    offset = 0
    for whole, (low, high) in zip(keys, known, strict=True):
        extent = mask.extent(run, (low, high)) if high > low else "empty"
        if extent == "full":
            there = slice(offset, offset + high - low)
            if found and found[-1].kind == "full" and found[-1].keys.stop == there.start:
                there = slice(found.pop().keys.start, there.stop)
            found.append(Piece(here, there, "full"))
        elif extent == "part" and mask.is_plain_causal and run == (low, high):
            found.append(Piece(here, slice(offset, offset + high - low), "causal"))
        elif extent == "part":
            found += _masked(mask, run, place, (low, high), offset)
        offset += whole[1] - whole[0]
    return found


def _masked(mask: AttentionMask, run: Run, place: int, keys: Run, offset: int) -> list[Piece]:
    """Blocks of some queries each, with the keys that these can see."""
    found = []
    for start in range(run[0], run[1], _MASKED_QUERIES):
        stop = min(start + _MASKED_QUERIES, run[1])
        low, high = mask.keys_of((start, stop), keys)
        if high > low:
            here = slice(place + start - run[0], place + stop - run[0])
            there = slice(offset + low - keys[0], offset + high - keys[0])
            kind = mask.extent((start, stop), (low, high))
            if kind != "empty":
                found.append(Piece(here, there, "full" if kind == "full" else "masked"))
    return found


def _joined(found: list[Piece]) -> list[Piece]:
    """Neighbouring queries that see all of the same keys are one block."""
    joined: list[Piece] = []
    for piece in found:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.kind == piece.kind == "full"
            and last.keys == piece.keys
            and last.queries.stop == piece.queries.start
        ):
            joined[-1] = Piece(slice(last.queries.start, piece.queries.stop), piece.keys, "full")
        else:
            joined.append(piece)
    return joined


def positions_of(runs: Sequence[Run], device: torch.device) -> Tensor:
    """All positions of `runs`, int64 `(length,)`."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in runs])


class Running:
    """Output and log-sum-exp of this rank's queries over all keys so far.

    Args:
        query: `(batch, heads, queries, width)`.
        value_width: width of the output.
    """

    def __init__(self, query: Tensor, value_width: int) -> None:
        self._like = query
        self._dtype = torch.promote_types(query.dtype, torch.float32)
        self._width = value_width
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        """Merge the attention of `queries` to further keys; see [Note: merging]."""
        if self._out is None and queries == slice(0, self._like.shape[2]):
            self._out, self._lse = out.to(self._dtype), lse
            return
        whole, total = self._tensors()
        here, before = whole[:, :, queries], total[:, :, queries]
        both = torch.logaddexp(before, lse)
        largest = both.masked_fill(both == -torch.inf, 0.0)
        here.mul_((before - largest).exp_().unsqueeze(-1))
        here.addcmul_(out.to(self._dtype), (lse - largest).exp_().unsqueeze(-1))
        before.copy_(both)

    def _tensors(self) -> tuple[Tensor, Tensor]:
        if self._out is None or self._lse is None:
            batch, heads, length, _ = self._like.shape
            # Laid out as the fused kernel lays out its output.
            self._out = self._like.new_zeros((batch, length, heads, self._width), dtype=self._dtype)
            self._out = self._out.transpose(1, 2)
            self._lse = self._like.new_full((batch, heads, length), -torch.inf, dtype=self._dtype)
        return self._out, self._lse

    def finish(self) -> tuple[Tensor, Tensor]:
        """(output in the query's element type, log-sum-exp with 0 for queries that saw nothing)."""
        out, lse = self._tensors()
        return out.to(self._like.dtype), lse.masked_fill(lse == -torch.inf, 0.0)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Computes the blocks of one call on this rank.

    Attributes:
        call: mask, scale and dropout.
        queries: runs of positions of the queries.
        first_head: number of the first query head among those of the call.
    """

    call: Attention
    queries: tuple[Run, ...]
    first_head: int = 0

    def forward(
        self, running: Running, query: Tensor, key: Tensor, value: Tensor, keys: Sequence[Run]
    ) -> None:
        """Attend to `key` and `value`, which lie at `keys`."""
        kernel = self._kernel(query, value)
        for piece in pieces(self.call, self.queries, keys):
            block = self._block(piece, keys, query)
            out, lse = kernel.forward(
                query[:, :, piece.queries], key[:, :, piece.keys], value[:, :, piece.keys], block
            )
            running.add(piece.queries, out, lse)

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        final: tuple[Tensor, Tensor],
        keys: Sequence[Run],
        sums: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Add to `sums` the gradients of (query, key, value) that these keys bring."""
        query, key, value = inputs
        kernel = self._kernel(query, value)
        for piece in pieces(self.call, self.queries, keys):
            q, k = piece.queries, piece.keys
            parts = kernel.backward(
                grad[:, :, q],
                (query[:, :, q], key[:, :, k], value[:, :, k]),
                (final[0][:, :, q], final[1][:, :, q]),
                self._block(piece, keys, query),
            )
            for total, part, where in zip(sums, parts, (q, k, k), strict=True):
                total[:, :, where] += part

    def _kernel(self, query: Tensor, value: Tensor) -> Kernel:
        return choose_kernel(query, value, has_dropout=self.call.keep is not None)

    def _block(self, piece: Piece, keys: Sequence[Run], query: Tensor) -> Block:
        device = query.device
        visible = keep = None
        if piece.kind == "masked" or self.call.keep is not None:
            here = positions_of(self.queries, device)[piece.queries]
            there = positions_of(keys, device)[piece.keys]
            if piece.kind == "masked":
                visible = self.call.mask.visible(self._known(here), there)
            if self.call.keep is not None:
                heads = slice(self.first_head, self.first_head + query.shape[1])
                keep = self.call.keep(heads, here, there)
        return Block(self.call.scale, is_causal=piece.kind == "causal", visible=visible, keep=keep)

    def _known(self, positions: Tensor) -> Tensor:
        """Positions of padding see what the last position does: tables by position end there."""
        return positions.clamp(max=self.call.length - 1)


def zeros_for(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Sums of gradients, in at least float32."""
    return tuple(torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in inputs)


def default_scale(query: Tensor, scale: float | None) -> float:
    """1 / sqrt(width of a head) where nothing else is asked for."""
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale
