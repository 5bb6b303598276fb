"""Norms over a dim that is cut, against one device."""

import pytest
import torch
from torch.nn import functional as F

from meshwright.tensor import norm


def _norms(mesh, sizes) -> None:
    group, index, width = mesh.group("dp"), mesh.rank, sum(sizes)
    generator = torch.Generator().manual_seed(2)
    x, g = (torch.randn(3, 4, width, generator=generator, dtype=torch.float64) for _ in range(2))
    x = x + 50.0  # a mean far from zero: squares minus the squared mean would lose digits
    weight, bias = (torch.randn(width, generator=generator, dtype=torch.float64) for _ in range(2))
    for is_layer in (True, False):
        plain = [t.clone().requires_grad_() for t in (x, weight, bias)]
        if is_layer:
            wanted = F.layer_norm(plain[0], (width,), plain[1], plain[2], 1e-5)
        else:
            wanted = F.rms_norm(plain[0], (width,), plain[1], 1e-5)
        wanted.backward(g)
        mine = [t.split(sizes, -1)[index].clone().requires_grad_() for t in (x, weight, bias)]
        settings = {"width": width, "epsilon": 1e-5, "cause": "t"}
        mesh.log.reset_counters()
        if is_layer:
            y = norm.layer_norm(mine[0], (mine[1], mine[2]), group, **settings)
        else:
            y = norm.rms_norm(mine[0], mine[1], group, **settings)
        torch.testing.assert_close(y, wanted.split(sizes, -1)[index], rtol=1e-11, atol=1e-11)
        y.backward(g.split(sizes, -1)[index])
        assert mesh.log.calls["all_reduce", "dp"] == (4 if is_layer else 2)
        for theirs, ours in zip(plain[: 3 if is_layer else 2], mine, strict=False):
            torch.testing.assert_close(ours.grad, theirs.grad.split(sizes, -1)[index], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("sizes", [(4, 4), (3, 3, 1), (2, 2, 2, 0)])
def test_norms_over_a_cut_dim(ranks, sizes) -> None:
    ranks.run(_norms, len(sizes), sizes)
