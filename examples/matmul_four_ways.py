"""One product y = x·w on real ranks, cut four ways: outputs and the gradient of w are one device's.

    python examples/matmul_four_ways.py

Each rank multiplies its blocks, puts the result at its place among zeros, and one sum over all ranks makes the whole:
where ranks hold different parts that is a concatenation, where they hold parts of the same sum it is that sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.comm.ops import all_reduce
from meshwright.tensor.blocks import Product, as_text, make_product
from meshwright.testing.ranks import RankPool

WAYS = {"data": 2, "column": 2, "row": 2, "hybrid": 4}


def matrices(product: Product) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and the gradient of y, float64, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((product.rows, product.inner), (product.inner, product.columns), (product.rows, product.columns))
    x, w, g = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return x, w, g


def on_a_rank(mesh: Any, product: Product) -> tuple[Tensor, Tensor]:
    """y and w_grad = xᵀ·g, from this rank's blocks and one sum each."""
    share = product.shares[mesh.rank]
    rows, inner, columns = (slice(*part) for part in (share.rows, share.inner, share.columns))
    x, w, g = matrices(product)
    y, w_grad = torch.zeros_like(g), torch.zeros_like(w)
    y[rows, columns] = x[rows, inner] @ w[inner, columns]
    w_grad[inner, columns] = x[rows, inner].t() @ g[rows, columns]
    for tensor in (y, w_grad):
        all_reduce(tensor, mesh.group("dp"), cause="whole").wait()
    return y, w_grad


def main() -> None:
    """Draw and run each way."""
    pool = RankPool()
    for way, num_ranks in WAYS.items():
        product = make_product(way, num_ranks)
        x, w, g = matrices(product)
        errors = [
            float((ours - theirs).abs().max())
            for y, w_grad in pool.run(on_a_rank, num_ranks, product)
            for ours, theirs in ((y, x @ w), (w_grad, x.t() @ g))
        ]
        print(f"{as_text(product)}\nworst difference to one device, of y and of w_grad: {max(errors):.1e}\n")
        assert max(errors) < 1e-14, f"{way} differs from one device"
    pool.close()


if __name__ == "__main__":
    main()
