"""Context parallelism: one sequence on several ranks, and attention that still sees all of it.

All layers but attention look at one position at a time: each rank runs them on its part of a sequence, and gradients of
weights are summed as in data parallelism, over dp x cp at once. In attention a query needs the keys of all ranks. Ring:
keys and values travel, and partial results merge by log-sum-exp. Ulysses: a rank gets some heads of all positions.
Simplification: causal masks only; for others see `docs/context.md`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.context.attend import attend
from meshwright.context.blocks import Attention, positions_of
from meshwright.context.masks import AttentionMask
from meshwright.layout.sequence import CpKind, SequenceCut, cut_sequence
from meshwright.lessons.parity import check_parity
from meshwright.lessons.pictures import bars
from meshwright.testing.ranks import RankPool

BATCH, HEADS, LENGTH, WIDTH, P = 1, 4, 64, 8, 4
KINDS: tuple[CpKind, ...] = ("ring", "ulysses", "allgather", "2d")


def main() -> None:
    """Run the lesson."""
    pool = RankPool()
    print(f"1. {LENGTH} positions on {P} ranks, and keys that their queries see under a causal mask.\n")
    for zigzag, how in ((False, "consecutive"), (True, "zigzag")):
        cut = cut_sequence(LENGTH, P, "ring", zigzag=zigzag)
        print(
            f"  {how}\n"
            + bars({picture(cut, rank): scores(cut, rank) for rank in range(P)}, unit="keys")
            + "\n"
        )
    print("2. Two halves of the keys by themselves, merged by their log-sum-exp.\n")
    wrong, right = merged()
    print(f"  mean of the two: off by {wrong:.1e}   weighted by exp(lse): off by {right:.1e}\n")
    print("3. Every kind against one device, with what a rank sends (forward and backward).\n")
    sent = {}
    for kind in KINDS:
        worst, nbytes = zip(*pool.run(one_call, P, kind), strict=True)
        sent[f"{kind:<9} = one device to {max(worst):.0e}"] = max(nbytes)
    print(bars(sent, unit="bytes"))
    print("\n4. The law: a GPT whose sequences lie on 2 or 4 ranks, its weights cut over all of them.\n")
    for policy, num_ranks, num_context_ranks in (("ddp", 2, 2), ("zero3", 4, 2), ("zero1", 4, 4)):
        print(check_parity(pool, policy, num_ranks=num_ranks, num_context_ranks=num_context_ranks).line())
    pool.close()


def picture(cut: SequenceCut, rank: int) -> str:
    """Positions, as `0-7 56-63`."""
    return f"rank {rank}: " + " ".join(f"{a:2}-{b - 1:<2}" for a, b in cut.runs(rank))


def scores(cut: SequenceCut, rank: int) -> int:
    """Keys that the queries of a rank see."""
    return sum(position + 1 for start, stop in cut.runs(rank) for position in range(start, stop))


def whole() -> list[Tensor]:
    """Query, key, value and the output's gradient."""
    generator = torch.Generator().manual_seed(9)
    shape = (BATCH, HEADS, LENGTH, WIDTH)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]


def merged() -> tuple[float, float]:
    """Errors of the mean of two partial results, and of their merging."""
    query, key, value, _ = whole()
    wanted = F.scaled_dot_product_attention(query, key, value)
    half = LENGTH // 2
    parts = [(key[:, :, :half], value[:, :, :half]), (key[:, :, half:], value[:, :, half:])]
    outs = [F.scaled_dot_product_attention(query, *part) for part in parts]
    lses = [(query @ keys.mT / math.sqrt(WIDTH)).logsumexp(-1, keepdim=True) for keys, _ in parts]
    both = torch.logaddexp(*lses)
    right = outs[0] * (lses[0] - both).exp() + outs[1] * (lses[1] - both).exp()
    return float((sum(outs) / 2 - wanted).abs().max()), float((right - wanted).abs().max())


def one_call(mesh: Any, kind: CpKind) -> tuple[float, int]:
    """Error of output and gradients on this rank, and the bytes that its operations send."""
    query, key, value, grad = whole()
    leaves = [x.requires_grad_() for x in (query, key, value)]
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    wanted = [expected.detach(), *torch.autograd.grad(expected, leaves, grad)]
    group, cut = mesh.group("dp"), cut_sequence(LENGTH, P, kind)
    here = positions_of(cut.runs(group.index), grad.device)
    mine = [x.detach()[:, :, here].requires_grad_() for x in leaves]
    call = Attention(AttentionMask(is_causal=True), LENGTH, WIDTH**-0.5)
    out = attend(*mine, call=call, cut=cut, group=group, kind=kind)
    found = [out.detach(), *torch.autograd.grad(out, mine, grad[:, :, here])]
    worst = max(float((a - b[:, :, here]).abs().max()) for a, b in zip(found, wanted, strict=True))
    assert worst < 1e-12, f"{kind} differs from one device by {worst:.3g}"
    return worst, sum(nbytes for (op, _), nbytes in mesh.log.bytes.items() if op != "receive")
