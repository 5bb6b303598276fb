"""Attention with dropout on its weights, exact, a block of queries at a time.

Kernels with dropout draw their masks inside and cannot be told which; here each block's mask comes from the call's
`Draw`, so it does not depend on how the batch is cut. Forward and backward hold three blocks of `_BLOCK_NUMEL`
scores (at least one row of keys) besides inputs, output and gradients; backward makes scores and mask again, as
FlashAttention does (Dao et al. 2022, algorithm 4 of the appendix).

Limits: no double backward; all keys are read for each block, also those that a causal mask hides.
Shape suffixes: N all leading dims as one, S queries, T keys, E width of query and key, V width of value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.comm.rng import Draw

_BLOCK_NUMEL = 1 << 20


@dataclass(frozen=True, eq=False)
class _Matrices:
    """A tensor as matrices `(number, rows, columns)`, and which of them matrix n of the result uses (None: n)."""

    shape: torch.Size
    index_N: Tensor | None

    def flat(self, x: Tensor) -> Tensor:
        return x.reshape(-1, *x.shape[-2:])

    def take(self, flat: Tensor, matrices: slice) -> Tensor:
        return flat[matrices] if self.index_N is None else flat.index_select(0, self.index_N[matrices])

    def add(self, flat: Tensor, matrices: slice, part: Tensor) -> None:
        if self.index_N is None:
            flat[matrices] += part
        else:
            flat.index_add_(0, self.index_N[matrices], part)


@dataclass(frozen=True, eq=False)
class _Call:
    """Everything about one call but its tensors."""

    lead: torch.Size
    query: _Matrices
    key: _Matrices
    value: _Matrices
    mask: _Matrices | None
    scale: float
    is_causal: bool
    draw: Draw

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """(matrices, queries): several whole matrices, or some queries of one; a block's scores are consecutive."""
        num_queries, num_keys = self.query.shape[-2], self.key.shape[-2]
        whole = max(1, _BLOCK_NUMEL // (num_queries * num_keys))
        rows = num_queries if num_queries * num_keys <= _BLOCK_NUMEL else max(1, _BLOCK_NUMEL // num_keys)
        for n in range(0, self.lead.numel(), whole):
            for s in range(0, num_queries, rows):
                yield slice(n, min(n + whole, self.lead.numel())), slice(s, min(s + rows, num_queries))

    def keep(self, matrices: slice, queries: slice, device: torch.device) -> Tensor:
        """Which weights of a block are kept, bool `(N, S, T)`."""
        num_queries, num_keys = self.query.shape[-2], self.key.shape[-2]
        shape = (matrices.stop - matrices.start, queries.stop - queries.start, num_keys)
        start = (matrices.start * num_queries + queries.start) * num_keys
        return self.draw.keep(start, start + math.prod(shape), device).view(shape)


def attention_with_dropout(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    draw: Draw,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention`, with the dropout of `draw`.

    Args:
        tensors: query `(..., S, E)`, key `(..., T, E)`, value `(..., T, V)`, and a mask that broadcasts to
            `(..., S, T)`, bool (True: attend) or added to the scores, or None.
        draw: over the weights `(..., S, T)`; `weights_shape` gives their shape.
        is_causal: query s attends to keys 0 .. s.
        scale: of the scores; None: 1 / sqrt(E).
        enable_gqa: groups of query heads (third dim from the end) share a key and value head.

    Returns:
        `(..., S, V)` in the query's element type. Scores of 16-bit inputs are float32.

    Raises:
        ValueError: both a mask and `is_causal`.
    """
    query, key, value, mask = tensors
    if mask is not None and is_causal:
        raise ValueError(
            "attention takes attn_mask or is_causal=True, not both; put the causal part in the mask"
        )
    if mask is not None and mask.dim() < 2:
        mask = mask.view((1,) * (2 - mask.dim()) + mask.shape)
    lead = weights_shape(query, key, value, enable_gqa=enable_gqa)[:-2]
    heads = lead[-1] if enable_gqa else None
    call = _Call(
        lead,
        _matrices(query, lead),
        _matrices(key, lead, heads),
        _matrices(value, lead, heads),
        None if mask is None else _matrices(mask, lead),
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        is_causal=is_causal,
        draw=draw,
    )
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    out = _Attention.apply(query, key, value, mask, call)
    return out.view(*lead, *out.shape[-2:])


def weights_shape(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> torch.Size:
    """Shape `(..., S, T)` of the attention weights; under GQA the query has the most heads."""
    leads = [x.shape[:-2] for x in (query, key, value)]
    if enable_gqa:
        leads = [leads[0], *(torch.Size((*lead[:-1], 1)) for lead in leads[1:])]
    return torch.Size((*torch.broadcast_shapes(*leads), query.shape[-2], key.shape[-2]))


def _matrices(x: Tensor, lead: torch.Size, heads: int | None = None) -> _Matrices:
    own = x.shape[:-2]
    if own == lead:
        return _Matrices(x.shape, None)
    numbers = torch.arange(own.numel(), device=x.device).view(own)
    if heads is not None and heads != own[-1]:
        numbers = numbers.repeat_interleave(heads // own[-1], dim=-1)
    return _Matrices(x.shape, numbers.expand(lead).reshape(-1))


def _high(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _weights(call: _Call, flat: tuple[Any, ...], matrices: slice, queries: slice) -> Tensor:
    """Softmax of a block's scores `(N, S, T)`; a query that sees no key gets zeros."""
    query_NSE, key_NTE, mask = flat[0], flat[1], flat[3]
    block = _high(call.query.take(query_NSE, matrices)[:, queries]) * call.scale
    scores = block @ _high(call.key.take(key_NTE, matrices)).mT
    if call.is_causal:
        columns = torch.arange(scores.shape[-1], device=scores.device)
        rows = torch.arange(queries.start, queries.stop, device=scores.device)
        return scores.masked_fill_(columns > rows[:, None], -torch.inf).softmax(-1)
    if mask is None or call.mask is None:
        return scores.softmax(-1)
    part = call.mask.take(mask, matrices)
    part = part if part.shape[1] == 1 else part[:, queries]
    if part.dtype == torch.bool:
        scores.masked_fill_(~part, -torch.inf)
    else:
        scores += part
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill_(blind, 0.0)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: _Call
    ) -> Tensor:
        flat = _flat(call, query, key, value, mask)
        out_NSV = query.new_empty((call.lead.numel(), query.shape[-2], value.shape[-1]))
        with torch.autocast(query.device.type, enabled=False):
            for matrices, queries in call.blocks():
                weights = _weights(call, flat, matrices, queries)
                weights *= call.keep(matrices, queries, query.device)
                part = weights @ _high(call.value.take(flat[2], matrices))
                out_NSV[matrices, queries] = (part * call.draw.scale).to(out_NSV.dtype)
        ctx.save_for_backward(query, key, value, mask, out_NSV)
        ctx.call = call
        return out_NSV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NSV: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out_NSV = ctx.saved_tensors
        call, flat = ctx.call, _flat(ctx.call, *inputs)
        grads = [
            torch.zeros_like(x, dtype=_high(x).dtype, memory_format=torch.contiguous_format)
            if x is not None and wanted
            else None
            for x, wanted in zip(flat, ctx.needs_input_grad, strict=False)
        ]
        for matrices, queries in call.blocks():
            grad = _high(grad_NSV[matrices, queries])
            _block_backward(call, flat, grads, (matrices, queries), (grad, out_NSV[matrices, queries]))
        results = [
            None if g is None else g.to(x.dtype).view(x.shape) for g, x in zip(grads, inputs, strict=True)
        ]
        return (*results, None)


def _flat(call: _Call, *inputs: Tensor | None) -> tuple[Any, ...]:
    kinds = (call.query, call.key, call.value, call.mask)
    return tuple(
        None if x is None or kind is None else kind.flat(x) for kind, x in zip(kinds, inputs, strict=True)
    )


def _block_backward(
    call: _Call,
    flat: tuple[Any, ...],
    grads: list[Tensor | None],
    where: tuple[slice, slice],
    output: tuple[Tensor, Tensor],
) -> None:
    """Add one block's part to `grads` of query, key, value and mask; `output` is (its gradient, its value)."""
    matrices, queries = where
    grad_NSV, out_NSV = output
    weights = _weights(call, flat, matrices, queries)
    keep = call.keep(matrices, queries, grad_NSV.device)
    scale = call.draw.scale
    if grads[2] is not None:
        call.value.add(grads[2], matrices, (weights * keep).mT @ grad_NSV * scale)
    grad_weights = grad_NSV @ _high(call.value.take(flat[2], matrices)).mT
    grad_weights.mul_(keep).mul_(scale)
    # The softmax's own sum over keys: sum of weight x its gradient = output · its gradient.
    rowsum = (grad_NSV * out_NSV).sum(-1, keepdim=True)
    grad_scores = grad_weights.sub_(rowsum).mul_(weights)
    if grads[0] is not None:
        part = grad_scores @ _high(call.key.take(flat[1], matrices)) * call.scale
        call.query.add(grads[0][:, queries], matrices, part)
    if grads[1] is not None:
        part = grad_scores.mT @ _high(call.query.take(flat[0], matrices)[:, queries]) * call.scale
        call.key.add(grads[1], matrices, part)
    if grads[3] is not None and call.mask is not None:
        rows, columns = call.mask.shape[-2:]
        part = grad_scores.sum(1, keepdim=True) if rows == 1 else grad_scores
        part = part.sum(2, keepdim=True) if columns == 1 else part
        call.mask.add(grads[3] if rows == 1 else grads[3][:, queries], matrices, part)
