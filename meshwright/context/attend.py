"""Attention over a group by the kind of the plan: the one door of this package.

Owns the choice, and the 2-D kind: Ulysses over neighbouring ranks, whose groups form rings (Fang, Zhao 2024, USP, arXiv
2405.07719). Bytes of a 2-D call: those of Ulysses over U ranks, and of a ring of R ranks with the heads that each has.
"""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from meshwright.comm.ops import Group
from meshwright.context.all_gather import gathered_attention
from meshwright.context.blocks import Attention
from meshwright.context.ring import Ring, ring_attention
from meshwright.context.ulysses import HeadRanks, Heads, over_heads, ulysses_attention
from meshwright.layout.sequence import CpKind, SequenceCut, factors


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    call: Attention,
    cut: SequenceCut,
    group: Group,
    kind: CpKind,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks of `group`.

    Args:
        query: `(batch, heads, local length, width)`, at the positions `cut.runs(group.index)`.
        key: the same with as many heads or fewer, each for a group of neighbouring query heads.
        value: as `key`; its width may be another.
        call: mask, scale and dropout.
        cut: of the sequence over the group, made for `kind`.
        group: the ranks.
        kind: how keys and queries meet.

    Returns:
        `(batch, heads, local length, width of value)`; 0 for queries that see no key.

    Raises:
        PlanError: E252 where heads are exchanged and a rank would get none.
    """
    everyone = tuple(range(group.size))
    if kind == "allgather":
        return gathered_attention(query, key, value, call=call, cut=cut, group=group)
    if kind == "ulysses":
        ranks = HeadRanks(group, everyone, group.index)
        return ulysses_attention(query, key, value, call=call, cut=cut, ranks=ranks)
    if kind == "2d":
        ranks, ring = two_d_ranks(cut, group)
        return over_heads(query, key, value, call=call, ranks=ranks, ring=ring)
    ring = Ring(group, everyone, group.index, cut.runs_of_all())
    return ring_attention(query, key, value, call=call, ring=ring)


def two_d_ranks(cut: SequenceCut, group: Group) -> tuple[HeadRanks, Ring]:
    """The neighbours with which this rank exchanges heads, and the ring of those who then have the same heads."""
    num_heads, num_rings = factors(group.size)
    ring_index, place = divmod(group.index, num_heads)
    first = ring_index * num_heads
    ranks = HeadRanks(group, tuple(range(first, first + num_heads)), place)
    members = tuple(place + number * num_heads for number in range(num_rings))
    return ranks, Ring(group, members, ring_index, cut.merged(num_heads).runs_of_all())


def calls_of_attention(
    kind: CpKind, size: int, *, num_heads: int, num_kv_heads: int
) -> tuple[Counter[str], Counter[str]]:
    """Operations that a rank issues in forward and in backward of one call."""
    if size == 1:
        return Counter(), Counter()
    if kind == "allgather":
        return Counter(all_gather=1), Counter(all_gather=1, reduce_scatter=1)
    exchanged, travelling = {"ulysses": (size, 1), "2d": factors(size)}.get(kind, (1, size))
    hops = travelling - 1
    forward, backward = Counter(send=hops, receive=hops), Counter(send=2 * hops, receive=2 * hops)
    if exchanged > 1:
        is_even = Heads.of(num_heads, num_kv_heads, exchanged).is_even and exchanged == size
        others = exchanged - 1
        both = Counter(all_to_all=2) if is_even else Counter(send=2 * others, receive=2 * others)
        forward, backward = forward + both, backward + both
    return +forward, +backward
