"""Tensor parallelism: a matrix product on several ranks, and why layers come in pairs of column and row split.

Data parallelism copies every matrix. Here each rank has some columns of a matrix, or some rows, and a copy of the model
lies on several ranks that all read the same samples. A column split by itself must gather its outputs and a row split
must sum them; a column split followed by a row split leaves one sum forward and one backward, and nothing between.
Weights are never reduced over these ranks: what their gradients need is at hand.
Simplification: norms, residuals and their activations are whole on every rank; sequence parallelism cuts those too.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.lessons.parity import check_parity
from meshwright.lessons.pictures import bars
from meshwright.tensor import linear, vocabulary
from meshwright.tensor.blocks import as_text, make_product
from meshwright.testing.ranks import RankPool

BATCH, DIM, HIDDEN, VOCABULARY, P = 6, 16, 50, 101, 2
CHUNKS = {1: (HIDDEN,), 2: (25, 25), 4: (13, 13, 12, 12)}


def main() -> None:
    """Run the lesson."""
    pool = RankPool()
    print("1. One product, its blocks by rank (* all ranks, Σ a sum over them).\n")
    for way in ("column", "row"):
        print(as_text(make_product(way, P)) + "\n")
    print(
        "2. Two layers on 2 ranks: each split by itself, and as a pair. Collectives, and numbers that travel.\n"
    )
    for how in ("naive", "pair"):
        worst, calls, moved = pool.run(two_layers, P, how)[0]
        listed = ", ".join(f"{count} {op.replace('_', '-')}" for op, count in sorted(calls.items()))
        print(f"  {how:<6} {listed:<48} {moved:>5,} numbers   = one device to {worst:.1e}")
    print(
        "\n3. Numbers of weights a rank has: 50 channels on 4 ranks are 13 13 12 12, nothing must divide.\n"
    )
    print(bars({f"{p} ranks": 2 * DIM * max(sizes) for p, sizes in CHUNKS.items()}, unit="numbers"))
    print("\n4. The loss over a cut vocabulary: four numbers a token from each rank instead of its logits.\n")
    worst, moved, logits = pool.run(cut_loss, P)[0]
    print(bars({"all logits": logits, "four numbers": moved}, unit="numbers"))
    print(f"\n  loss and gradient = one device to {worst:.1e}")
    print("\n5. The law: 4 ranks as 2 x 2, weights cut over both.\n")
    for policy in ("ddp", "zero3"):
        print(check_parity(pool, policy, num_ranks=4, num_tensor_ranks=2).line())
    pool.close()


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _worst(pairs: list[tuple[Tensor, Tensor]]) -> float:
    worst = max(float((ours - theirs).detach().norm() / theirs.detach().norm()) for ours, theirs in pairs)
    assert worst < 1e-12, f"differs from one device by {worst:.3g}"
    return worst


def two_layers(mesh: Any, how: str) -> tuple[float, Counter[str], int]:
    """Error of y and of x_grad, collectives, and their elements, of forward and backward."""
    group, index, sizes = mesh.group("dp"), mesh.rank, CHUNKS[P]
    x, g = _random(BATCH, DIM, seed=1), _random(BATCH, DIM, seed=2)
    a, b = _random(HIDDEN, DIM, seed=3), _random(DIM, HIDDEN, seed=4)
    plain, ours = (x.clone().requires_grad_() for _ in range(2))
    wanted = F.linear(F.linear(plain, a), b)
    x_grad = torch.autograd.grad(wanted, plain, g)[0]
    mine_a, mine_b = a.split(sizes, 0)[index], b.split(sizes, 1)[index]
    mesh.log.reset_counters()
    if how == "naive":
        middle = linear.naive_column(ours, mine_a, None, group, sizes=sizes, cause="lesson")
        y = linear.naive_row(middle, mine_b, None, group, sizes=sizes, cause="lesson")
    else:
        y = linear.row(
            linear.column(ours, mine_a, None, group, cause="lesson"), mine_b, None, group, cause="lesson"
        )
    our_grad = torch.autograd.grad(y, ours, g)[0]
    calls = Counter({op: count for (op, _), count in mesh.log.calls.items()})
    return _worst([(y, wanted), (our_grad, x_grad)]), calls, sum(mesh.log.bytes.values()) // 8


def cut_loss(mesh: Any) -> tuple[float, int, int]:
    """Error of loss and gradient, elements that travelled, and elements of all logits."""
    group, sizes = mesh.group("dp"), (51, 50)
    logits, labels = _random(BATCH, VOCABULARY, seed=5), torch.arange(BATCH) * 17
    plain, mine = logits.clone().requires_grad_(), logits.split(sizes, 1)[mesh.rank].clone().requires_grad_()
    wanted = F.cross_entropy(plain, labels, reduction="sum")
    mesh.log.reset_counters()
    loss = vocabulary.summed_cross_entropy(
        mine, labels, group, first=51 * mesh.rank, vocab_size=VOCABULARY, cause="lesson"
    )
    wanted_grad, grad = torch.autograd.grad(wanted + loss, (plain, mine))
    error = _worst([(loss, wanted), (grad, wanted_grad.split(sizes, 1)[mesh.rank])])
    return error, sum(mesh.log.bytes.values()) // 8, logits.numel()
