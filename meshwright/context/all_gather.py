"""Attention over gathered keys and values; backward gathers them again and reduce-scatters their gradients.

Owns these three collectives. Source: Dubey et al. 2024, The Llama 3 herd of models (arXiv 2407.21783, section 3.3.2).
While it runs a rank holds the keys and values of the whole sequence, and keeps its own part of them for backward.

Bytes by the log, with KV those of a rank's keys and values and G those of their gradients in at least float32:
forward P·KV (all-gather), backward P·KV (all-gather) and P·G (reduce-scatter); `logged_bytes`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.comm import ops
from meshwright.comm.ops import Group
from meshwright.context.blocks import Attention, Blocks, Running, zeros_for
from meshwright.context.ring import packed, unpacked, unpacked_pair
from meshwright.layout.sequence import SequenceCut


def gathered_attention(
    query: Tensor, key: Tensor, value: Tensor, *, call: Attention, cut: SequenceCut, group: Group
) -> Tensor:
    """Attention of this rank's queries to the keys of the whole group; shapes as `ring_attention`."""
    return _GatheredAttention.apply(query, key, value, call, cut, group)


def logged_bytes(key: Tensor, value: Tensor, size: int) -> dict[str, tuple[int, int]]:
    """Bytes of one call by operation, forward and backward, as the log counts them."""
    numel = size * (key.numel() + value.numel())
    gradient = torch.promote_types(key.dtype, torch.float32).itemsize
    gathered = numel * key.itemsize
    return {"all_gather": (gathered, gathered), "reduce_scatter": (0, numel * gradient)}


def _gather(key: Tensor, value: Tensor, group: Group) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every rank."""
    mine = packed(key, value)
    whole = mine.new_empty(group.size * mine.numel())
    ops.all_gather(whole, mine, group, cause="keys and values").wait()
    return [unpacked_pair(part, key, value) for part in whole.view(group.size, -1)]


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Attention, cut: SequenceCut, group: Group
    ) -> Tensor:
        blocks = Blocks(call, cut.runs(group.index))
        running = Running(query, value.shape[-1])
        for index, there in enumerate(_gather(key, value, group)):
            blocks.forward(running, query, *there, cut.runs(index))
        out, lse = running.finish()
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.blocks, ctx.cut, ctx.group = blocks, cut, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        group: Group = ctx.group
        (grad_query,) = zeros_for(query)
        dtype = torch.promote_types(key.dtype, torch.float32)
        whole = key.new_zeros((group.size, key.numel() + value.numel()), dtype=dtype)
        for index, there in enumerate(_gather(key, value, group)):
            grad_key, grad_value = unpacked(whole[index], (key, value))
            ctx.blocks.backward(
                grads[0],
                (query, *there),
                (out, lse),
                ctx.cut.runs(index),
                (grad_query, grad_key, grad_value),
            )
        mine = whole.new_empty(whole.shape[1])
        ops.reduce_scatter(mine, whole.view(-1), group, cause="gradients of keys and values").wait()
        grad_key, grad_value = unpacked(mine, (key, value))
        return (
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            None,
            None,
            None,
        )
