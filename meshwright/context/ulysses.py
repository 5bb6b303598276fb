"""Ulysses attention: one exchange gives each rank some heads over the whole sequence, another brings outputs home.

Owns which heads go where, and both exchanges. Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv 2309.14509). Heads
need not divide: whole groups of query heads with their key/value head are spread as evenly as can be, and where
there are fewer key/value heads than ranks each rank is sent those of its query heads.

Bytes that a rank sends, its own part left out: forward those of queries, keys and values that others' heads need, and
of outputs at others' positions; backward the same the other way; `sent_bytes`. With even heads an exchange is one
all-to-all, whose bytes in the log are P / (P-1) of that; else it is point to point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import ops
from meshwright.comm.ops import Group
from meshwright.context.blocks import Attention
from meshwright.context.ring import Ring, packed, ring_attention, unpacked
from meshwright.layout.sequence import SequenceCut, check_heads
from meshwright.layout.tensor_layout import split_heads


@dataclass(frozen=True, eq=False)
class HeadRanks:
    """Ranks of a group among which heads are spread.

    Attributes:
        group: all ranks that can be reached.
        members: positions in it of the ranks that share heads.
        index: this rank's place among them.
    """

    group: Group
    members: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def is_all(self) -> bool:
        """Whether they are the whole group."""
        return self.size == self.group.size


@dataclass(frozen=True)
class Heads:
    """Which heads each rank computes.

    Attributes:
        query: (first, stop) of each rank's query heads.
        kv: key/value heads that each rank is sent, ascending.
        share: query heads of a key/value head.
    """

    query: tuple[tuple[int, int], ...]
    kv: tuple[tuple[int, ...], ...]
    share: int

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, size: int) -> Heads:
        """Spread them over `size` ranks."""
        sizes = split_heads(num_heads, num_kv_heads, size, where="attention").query
        firsts = [sum(sizes[:index]) for index in range(size)]
        query = tuple((first, first + n) for first, n in zip(firsts, sizes, strict=True))
        share = num_heads // num_kv_heads
        kv = tuple(tuple(range(first // share, -(-stop // share))) for first, stop in query)
        return cls(query, kv, share)

    @property
    def is_even(self) -> bool:
        """Whether every rank gets as much."""
        return len({b - a for a, b in self.query}) == 1 == len({len(own) for own in self.kv})

    def repeats(self, index: int) -> list[int] | None:
        """Place, among the sent, of each query head's key/value head; None where equal groups follow each other."""
        first, stop = self.query[index]
        places = [head // self.share - self.kv[index][0] for head in range(first, stop)]
        number, rest = divmod(len(places), len(self.kv[index]))
        return None if not rest and places == [n // number for n in range(len(places))] else places


def ulysses_attention(
    query: Tensor, key: Tensor, value: Tensor, *, call: Attention, cut: SequenceCut, ranks: HeadRanks
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks; shapes as `ring_attention`.

    Raises:
        PlanError: E252 where a rank would get no head.
    """
    ring = Ring(ranks.group, (ranks.group.index,), 0, cut.merged(ranks.size).runs_of_all())
    return over_heads(query, key, value, call=call, ranks=ranks, ring=ring)


def over_heads(
    query: Tensor, key: Tensor, value: Tensor, *, call: Attention, ranks: HeadRanks, ring: Ring
) -> Tensor:
    """Exchange heads for positions among `ranks`, attend in `ring` with these heads, and exchange back."""
    if ranks.size > query.shape[1]:
        check_heads(ranks.size, query.shape[1], "ulysses")
    heads = Heads.of(query.shape[1], key.shape[1], ranks.size)
    query, key, value = _ToHeads.apply(query, key, value, heads, ranks)
    repeats = heads.repeats(ranks.index)
    if repeats is not None:
        places = torch.tensor(repeats, device=key.device)
        key, value = key.index_select(1, places), value.index_select(1, places)
    first = heads.query[ranks.index][0]
    ring = Ring(ring.group, ring.members, ring.index, ring.runs, ring.first_head + first)
    out = ring_attention(query, key, value, call=call, ring=ring)
    return _ToPositions.apply(out, heads, ranks)


def sent_bytes(query: Tensor, key: Tensor, value: Tensor, ranks: HeadRanks) -> tuple[int, int]:
    """Bytes that a rank sends to others in forward and in backward of one call."""
    heads = Heads.of(query.shape[1], key.shape[1], ranks.size)
    rows = query.shape[0] * query.shape[2] * query.itemsize
    widths = key.shape[-1] + value.shape[-1]
    there = here = 0
    mine, mine_kv = _number(heads.query[ranks.index]), len(heads.kv[ranks.index])
    for index in range(ranks.size):
        if index != ranks.index:
            there += _number(heads.query[index]) * query.shape[-1] + len(heads.kv[index]) * widths
            here += mine * query.shape[-1] + mine_kv * widths
    out = (query.shape[1] - mine) * value.shape[-1]
    back = (ranks.size - 1) * mine * value.shape[-1]
    return rows * (there + back), rows * (here + out)


def _number(heads: tuple[int, int]) -> int:
    return heads[1] - heads[0]


def _exchange(parts: Sequence[Tensor], sizes: Sequence[int], ranks: HeadRanks, cause: str) -> list[Tensor]:
    """Send part i (1-D) to member i; what comes from each member, of these sizes."""
    if len({*sizes, *(part.numel() for part in parts)}) == 1 and ranks.is_all:
        source = torch.cat(list(parts))
        output = torch.empty_like(source)
        ops.all_to_all(
            output.view(ranks.size, -1), source.view(ranks.size, -1), ranks.group, cause=cause
        ).wait()
        return list(output.view(ranks.size, -1))
    received = [parts[i] if i == ranks.index else parts[0].new_empty(size) for i, size in enumerate(sizes)]
    others = [(ranks.index + step) % ranks.size for step in range(1, ranks.size)]
    handles = [
        ops.receive(received[i], ranks.group, index=ranks.members[i], tag=2, cause=cause) for i in others
    ]
    handles += [ops.send(parts[i], ranks.group, index=ranks.members[i], tag=2, cause=cause) for i in others]
    for handle in handles:
        handle.wait()
    return received


def _forward_exchange(tensors: Sequence[Tensor], heads: Heads, ranks: HeadRanks, cause: str) -> list[Tensor]:
    """(query, key, value) of all heads at our positions -> of our heads at all positions."""
    chosen = [_chosen(tensors, heads, index) for index in range(ranks.size)]
    ours = chosen[ranks.index]
    size = sum(tensor.numel() for tensor in ours)
    received = _exchange([packed(*own) for own in chosen], [size] * ranks.size, ranks, cause)
    shaped = [unpacked(part, ours) for part in received]
    return [torch.cat([own[n] for own in shaped], 2) for n in range(len(tensors))]


def _chosen(tensors: Sequence[Tensor], heads: Heads, index: int) -> list[Tensor]:
    """What rank `index` computes with: its query heads, and the key/value heads that these need."""
    first, stop = heads.query[index]
    kv = slice(heads.kv[index][0], heads.kv[index][-1] + 1)
    return [tensors[0][:, first:stop], *(tensor[:, kv] for tensor in tensors[1:])]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, heads: Heads, ranks: HeadRanks
    ) -> tuple[Tensor, ...]:
        ctx.shapes, ctx.heads, ctx.ranks = (query.shape, key.shape, value.shape), heads, ranks
        return tuple(_forward_exchange((query, key, value), heads, ranks, "heads of queries, keys, values"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        heads, ranks = ctx.heads, ctx.ranks
        sums = [grad.new_zeros(shape) for grad, shape in zip(grads, ctx.shapes, strict=True)]
        parts = [packed(*own) for own in zip(*(grad.chunk(ranks.size, 2) for grad in grads), strict=True)]
        targets = [_chosen(sums, heads, index) for index in range(ranks.size)]
        sizes = [sum(target.numel() for target in own) for own in targets]
        cause = "gradients of heads"
        for own, part in zip(targets, _exchange(parts, sizes, ranks, cause), strict=True):
            for total, grad in zip(own, unpacked(part, own), strict=True):
                total += grad
        return (*sums, None, None)


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, heads: Heads, ranks: HeadRanks) -> Tensor:
        ctx.heads, ctx.ranks = heads, ranks
        batch, _, length, width = out.shape
        rows = batch * (length // ranks.size) * width
        parts = [packed(part) for part in out.chunk(ranks.size, 2)]
        sizes = [rows * _number(own) for own in heads.query]
        received = _exchange(parts, sizes, ranks, "outputs of heads")
        return torch.cat([part.view(batch, -1, length // ranks.size, width) for part in received], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        heads, ranks, grad = ctx.heads, ctx.ranks, grads[0]
        batch, _, length, width = grad.shape
        mine = _number(heads.query[ranks.index])
        parts = [packed(grad[:, first:stop]) for first, stop in heads.query]
        sizes = [batch * mine * length * width] * ranks.size
        received = _exchange(parts, sizes, ranks, "gradients of outputs")
        return torch.cat([part.view(batch, mine, length, width) for part in received], 2), None, None
