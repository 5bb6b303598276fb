"""Linear layers over ranks: published vectors, equality with one device, and what travels."""

from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from meshwright.comm import ops
from meshwright.tensor import linear, uneven

DOUBLE = torch.float64


def _counts(mesh) -> dict[str, int]:
    """Operations since the last question."""
    found = Counter({op: count for (op, _), count in mesh.log.calls.items() if count})
    mesh.log.reset_counters()
    return dict(found)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


# The vectors of the course assignment: a naive last layer on 4 ranks, 8 outputs.


def _naive_vectors(mesh) -> tuple[list, list, list]:
    group, rank = mesh.group("dp"), mesh.rank
    rows = slice(2 * rank, 2 * rank + 2)
    x = torch.arange(16.0).reshape(8, 2)[rows].requires_grad_()
    gathered = uneven.gather_sum(x, group, dim=-1, sizes=(2,) * 4, cause="t")
    y = torch.zeros(2, 2, requires_grad=True)
    whole = uneven.gather(y, group, dim=-1, sizes=(2,) * 4, cause="t")
    whole.backward(torch.arange(16.0).reshape(2, 8))
    gathered.backward(torch.arange(64.0).reshape(8, 8)[rows])
    return gathered.tolist(), y.grad.tolist(), x.grad.tolist()


def test_naive_vectors(ranks) -> None:
    found = ranks.run(_naive_vectors, 4)
    for gathered, _, _ in found:
        assert gathered == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    assert found[0][1] == [[0, 1], [8, 9]]
    assert found[3][1] == [[6, 7], [14, 15]]
    assert [x_grad for _, _, x_grad in found] == [
        [[96, 100], [128, 132]],
        [[104, 108], [136, 140]],
        [[112, 116], [144, 148]],
        [[120, 124], [152, 156]],
    ]


def _megatron_vectors(mesh) -> tuple[list, list]:
    group, rank = mesh.group("dp"), mesh.rank
    x = torch.arange(16.0).reshape(8, 2)[2 * rank : 2 * rank + 2].requires_grad_()
    y = linear.row(x, torch.eye(2), None, group, cause="t")
    y.backward(torch.tensor([[1.0, 2], [3, 4]]))
    return y.tolist(), x.grad.tolist()


def test_megatron_vectors(ranks) -> None:
    for y, x_grad in ranks.run(_megatron_vectors, 4):
        assert y == [[24, 28], [32, 36]]
        assert x_grad == [[1, 2], [3, 4]]


# One product, four ways.


def _one_product(mesh, how: str) -> None:
    """x 4 x 5 · w 5 x 8: outputs and the gradient of w are one device's."""
    group, index, size = mesh.group("dp"), mesh.rank, mesh.world.size
    x, w, g = _random(4, 5), _random(5, 8, seed=1), _random(4, 8, seed=2)
    weight_grad, y = x.t() @ g, x @ w
    columns, rows = (4, 4), (2, 3)
    if how == "data":
        part = x[2 * index : 2 * index + 2]
        assert part.shape == (2, 5)
        torch.testing.assert_close(part @ w, y[2 * index : 2 * index + 2])
        mine = w.t().clone().requires_grad_()
        out = F.linear(uneven.split(x, group, dim=0, sizes=(2, 2), cause="t"), mine)
        out.backward(g[2 * index : 2 * index + 2])
        total = mine.grad.contiguous()
        ops.all_reduce(total, group, cause="t").wait()
        torch.testing.assert_close(total, weight_grad.t())
    elif how == "column":
        mine = w.split(columns, 1)[index].t().clone().requires_grad_()
        assert mine.shape == (4, 5)
        out = linear.naive_column(x, mine, None, group, sizes=columns, cause="t")
        torch.testing.assert_close(out, y)
        out.backward(g)
        torch.testing.assert_close(mine.grad, weight_grad.split(columns, 1)[index].t())
    else:
        mine = w.split(rows, 0)[index].t().clone().requires_grad_()
        assert mine.shape == (8, rows[index])
        out = linear.naive_row(x, mine, None, group, sizes=rows, cause="t")
        torch.testing.assert_close(out, y)
        out.backward(g)
        torch.testing.assert_close(mine.grad, weight_grad.split(rows, 0)[index].t())
    assert size == 2


@pytest.mark.parametrize("how", ["data", "column", "row"])
def test_one_product_on_two_ranks(ranks, how: str) -> None:
    ranks.run(_one_product, 2, how)


def _naive_layers(mesh, columns, rows) -> None:
    """Values, gradients and calls of each naive layer by itself."""
    group, index = mesh.group("dp"), mesh.rank
    x, weight, bias, g = (
        _random(2, 3, 7),
        _random(10, 7, seed=1),
        _random(10, seed=2),
        _random(2, 3, 10, seed=3),
    )
    plain = [t.clone().requires_grad_() for t in (x, weight, bias)]
    F.linear(*plain).backward(g)
    y = F.linear(x, weight, bias)
    _counts(mesh)
    ours = x.clone().requires_grad_()
    w = weight.split(columns, 0)[index].clone().requires_grad_()
    b = bias.split(columns)[index].clone().requires_grad_()
    out = linear.naive_column(ours, w, b, group, sizes=columns, cause="t")
    torch.testing.assert_close(out, y)
    assert _counts(mesh) == {"all_gather": 1}
    out.backward(g)
    assert _counts(mesh) == {"all_reduce": 1}
    torch.testing.assert_close(ours.grad, plain[0].grad)
    torch.testing.assert_close(w.grad, plain[1].grad.split(columns, 0)[index])
    torch.testing.assert_close(b.grad, plain[2].grad.split(columns)[index])
    # The same with an x that is cut: gathered on the way in, its gradient reduce-scattered.
    ours = x.split(rows, -1)[index].clone().requires_grad_()
    out = linear.naive_column(ours, w, b, group, sizes=columns, input_sizes=rows, cause="t")
    torch.testing.assert_close(out, y)
    assert _counts(mesh) == {"all_gather": 2}
    out.backward(g)
    assert _counts(mesh) == {"reduce_scatter": 1}
    torch.testing.assert_close(ours.grad, plain[0].grad.split(rows, -1)[index])
    # Row.
    ours = x.clone().requires_grad_()
    w = weight.split(rows, 1)[index].clone().requires_grad_()
    b = bias.clone().requires_grad_()
    out = linear.naive_row(ours, w, b, group, sizes=rows, cause="t")
    torch.testing.assert_close(out, y)
    assert _counts(mesh) == {"all_reduce": 1}
    out.backward(g)
    assert _counts(mesh) == {"all_gather": 1}
    torch.testing.assert_close(ours.grad, plain[0].grad)
    torch.testing.assert_close(w.grad, plain[1].grad.split(rows, 1)[index])
    torch.testing.assert_close(b.grad, plain[2].grad)


@pytest.mark.parametrize(
    ("columns", "rows"), [((5, 5), (4, 3)), ((4, 3, 3), (3, 2, 2)), ((3, 3, 2, 2), (4, 3, 0, 0))]
)
def test_naive_layers_equal_one_device(ranks, columns, rows) -> None:
    ranks.run(_naive_layers, len(columns), columns, rows)


def _conjugates(mesh) -> None:
    """The x-gradient of a column split of w is the forward of a row split of wᵀ, and the other way round."""
    group, index = mesh.group("dp"), mesh.rank
    sizes = (3, 2, 1)
    weight, g, x = _random(6, 4), _random(5, 6, seed=1), _random(5, 4, seed=2)
    part = weight.split(sizes, 0)[index]
    entry = x.clone().requires_grad_()
    linear.column(entry, part, None, group, cause="t").backward(g.split(sizes, 1)[index])
    assert torch.equal(entry.grad, linear.row(g.split(sizes, 1)[index], part.t(), None, group, cause="t"))
    mine = g.split(sizes, 1)[index].clone().requires_grad_()
    linear.row(mine, part.t(), None, group, cause="t").backward(x)
    assert torch.equal(mine.grad, linear.column(x, part, None, group, cause="t"))


def test_column_and_row_are_conjugate(ranks) -> None:
    ranks.run(_conjugates, 3)


def _pair(mesh, sizes) -> None:
    group, index = mesh.group("dp"), mesh.rank
    width = sum(sizes)
    x, g = _random(2, 3, 5), _random(2, 3, 5, seed=9)
    up = _random(width, 5, seed=1), _random(width, seed=2)
    down = _random(5, width, seed=3), _random(5, seed=4)
    plain = [t.clone().requires_grad_() for t in (x, *up, *down)]
    y = F.linear(F.gelu(F.linear(*plain[:3])), *plain[3:])
    y.backward(g)
    cut = [
        x.clone(),
        *(t.split(sizes, 0)[index].clone() for t in up),
        down[0].split(sizes, 1)[index].clone(),
        down[1].clone(),
    ]
    cut = [t.requires_grad_() for t in cut]
    _counts(mesh)
    ours = linear.feed_forward(
        cut[0], (cut[1], cut[2]), (cut[3], cut[4]), group, activation=F.gelu, cause="t"
    )
    assert _counts(mesh) == {"all_reduce": 1}
    torch.testing.assert_close(ours, y)
    ours.backward(g)
    assert _counts(mesh) == {"all_reduce": 1}
    wanted = [
        plain[0].grad, *(t.grad.split(sizes, 0)[index] for t in plain[1:3]), plain[3].grad.split(sizes, 1)[index],
        plain[4].grad,
    ]  # fmt: skip
    for theirs, mine in zip(wanted, cut, strict=True):
        torch.testing.assert_close(mine.grad, theirs)


@pytest.mark.parametrize("sizes", [(4, 4), (13, 13, 12, 12), (2, 1, 0)])
def test_a_pair_has_one_sum_each_way(ranks, sizes) -> None:
    ranks.run(_pair, len(sizes), sizes)


def _fused(mesh) -> None:
    """Query, key and value of one x: three products, one reduction of its gradient."""
    group, index = mesh.group("dp"), mesh.rank
    x = _random(2, 3, 6)
    weights = [_random(4, 6, seed=s) for s in (1, 2, 3)]
    g = [_random(2, 3, 4, seed=s) for s in (4, 5, 6)]
    plain = x.clone().requires_grad_()
    sum((F.linear(plain, w) * grad).sum() for w, grad in zip(weights, g, strict=True)).backward()
    ours = x.clone().requires_grad_()
    _counts(mesh)
    parts = linear.fused_columns(ours, [(w.chunk(2)[index], None) for w in weights], group, cause="t")
    assert _counts(mesh) == {}
    sum((y * grad.chunk(2, -1)[index]).sum() for y, grad in zip(parts, g, strict=True)).backward()
    assert _counts(mesh) == {"all_reduce": 1}
    torch.testing.assert_close(ours.grad, plain.grad)


def test_fused_projections_share_one_backward_sum(ranks) -> None:
    ranks.run(_fused, 2)
