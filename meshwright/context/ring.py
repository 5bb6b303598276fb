"""Ring attention: queries stay, blocks of keys and values travel from rank to rank while the last one is computed.

Owns what travels and when. Source: Liu et al. 2023, Ring attention with blockwise transformers (arXiv 2310.01889); the
balanced order is that of `layout/sequence.py`. After P-1 hops every rank has seen every block. In backward the blocks
travel again, and with each of them the gradient that it has collected; one more hop than it waited brings that home.

Bytes that a rank sends, with KV those of its keys and values and G those of their gradients in at least float32:
forward (P-1)·KV, backward (P-1)·(KV + G); `sent_bytes`. A rank holds two blocks of keys and values at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.comm import ops
from meshwright.comm.ops import Group, Handle
from meshwright.context.blocks import Attention, Blocks, Running, zeros_for
from meshwright.layout.sequence import Run

_KEYS, _GRADIENTS = 0, 1


@dataclass(frozen=True, eq=False)
class Ring:
    """Ranks of a group in the order in which blocks travel.

    Attributes:
        group: all ranks that can be reached.
        members: positions in the group of the ranks of this ring.
        index: this rank's place among them.
        runs: positions that each of them holds.
        first_head: see `Blocks`.
    """

    group: Group
    members: tuple[int, ...]
    index: int
    runs: tuple[tuple[Run, ...], ...]
    first_head: int = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    def source(self, hop: int) -> int:
        """Whose block is here after so many hops."""
        return (self.index - hop) % self.size

    def shift(self, send: Tensor, receive: Tensor, *, tag: int, cause: str) -> tuple[Handle, Handle]:
        """Start sending to the next rank and receiving from the one before."""
        after, before = self.members[(self.index + 1) % self.size], self.members[(self.index - 1) % self.size]
        arrives = ops.receive(receive, self.group, index=before, tag=tag, cause=cause)
        return arrives, ops.send(send, self.group, index=after, tag=tag, cause=cause)


def ring_attention(query: Tensor, key: Tensor, value: Tensor, *, call: Attention, ring: Ring) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks of the ring.

    Args:
        query: `(batch, heads, local length, width)`, at the positions `ring.runs[ring.index]`.
        key: the same with as many heads or fewer, each for a group of query heads.
        value: as `key`.
        call: mask, scale and dropout.
        ring: the ranks.

    Returns:
        `(batch, heads, local length, width of value)` in the query's element type.
    """
    return _RingAttention.apply(query, key, value, call, ring)


def sent_bytes(key: Tensor, value: Tensor, size: int) -> tuple[int, int]:
    """Bytes that a rank sends in forward and in backward of one call."""
    numel = key.numel() + value.numel()
    gradient = torch.promote_types(key.dtype, torch.float32).itemsize
    return (size - 1) * numel * key.itemsize, (size - 1) * numel * (key.itemsize + gradient)


def packed(*tensors: Tensor) -> Tensor:
    """All elements in one 1-D tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unpacked(buffer: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Views of `buffer` with the shapes of `like`."""
    parts = buffer.split([tensor.numel() for tensor in like])
    return tuple(part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True))


def unpacked_pair(buffer: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """As `unpacked`, of two."""
    one, two = unpacked(buffer, (first, second))
    return one, two


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Attention, ring: Ring) -> Tensor:
        blocks = Blocks(call, ring.runs[ring.index], ring.first_head)
        running = Running(query, value.shape[-1])
        for source, here in _travelling(ring, key, value):
            blocks.forward(running, query, *here, ring.runs[source])
        out, lse = running.finish()
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.blocks, ctx.ring = blocks, ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        blocks, ring = ctx.blocks, ctx.ring
        grad_query, *own = zeros_for(query, key, value)
        arriving: tuple[Tensor, tuple[Handle, Handle]] | None = None
        leaving: list[tuple[Tensor, Handle]] = []
        for hop, (source, here) in enumerate(_travelling(ring, key, value)):
            sums = zeros_for(*here) if hop else own
            blocks.backward(
                grads[0], (query, *here), (out, lse), ring.runs[source], (grad_query, sums[0], sums[1])
            )
            if not hop:
                continue
            mine = packed(*sums)
            if arriving is not None:
                collected, handles = arriving
                handles[0].wait()
                mine += collected
            # What it collects next comes from the rank before; after the last hop that is this rank's own block.
            collected = torch.empty_like(mine)
            handles = ring.shift(mine, collected, tag=_GRADIENTS, cause="ring gradients")
            leaving.append((mine, handles[1]))
            arriving = collected, handles
        if arriving is not None:
            collected, handles = arriving
            handles[0].wait()
            for total, part in zip(own, unpacked(collected, own), strict=True):
                total += part
        for _, handle in leaving:
            handle.wait()
        return grad_query.to(query.dtype), own[0].to(key.dtype), own[1].to(value.dtype), None, None


def _travelling(ring: Ring, key: Tensor, value: Tensor) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """(whose, (keys, values)) of all ranks, this rank's own first; the next is on its way while one is used."""
    if ring.size == 1:
        yield ring.index, (key, value)
        return
    here = packed(key, value)
    for hop in range(ring.size):
        handles: tuple[Handle, ...] = ()
        if hop < ring.size - 1:
            coming = torch.empty_like(here)
            handles = ring.shift(here, coming, tag=_KEYS, cause="ring keys and values")
        yield ring.source(hop), (unpacked_pair(here, key, value) if hop else (key, value))
        for handle in handles:
            handle.wait()
        if handles:
            here = coming
