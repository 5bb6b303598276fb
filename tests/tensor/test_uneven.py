"""Cuts of a dim into chunks of any size, forward and backward, on real ranks."""

import pytest
import torch

from meshwright.tensor import uneven

CHUNKS = {2: (3, 4), 3: (2, 2, 1), 4: (2, 0, 1, 1)}


def _pieces(x: torch.Tensor, sizes, index: int) -> torch.Tensor:
    return x.split(list(sizes), 1)[index]


def _every_pair(mesh, sizes) -> None:
    group = mesh.group("dp")
    index, total = group.index, sum(sizes)
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(2, total, 3, generator=generator, dtype=torch.float64)
    weights = [torch.randn(2, total, 3, generator=generator, dtype=torch.float64) for _ in range(group.size)]
    mine = _pieces(whole, sizes, index).clone().requires_grad_()
    y = uneven.gather(mine, group, dim=1, sizes=sizes, cause="t")
    assert torch.equal(y, whole)
    (y * weights[0]).sum().backward()  # a replicated use: the same on every rank
    assert torch.equal(mine.grad, _pieces(weights[0], sizes, index))
    mine.grad = None
    y = uneven.gather_sum(mine, group, dim=1, sizes=sizes, cause="t")
    assert torch.equal(y, whole)
    (y * weights[index]).sum().backward()  # every rank uses it in its own way
    torch.testing.assert_close(mine.grad, _pieces(sum(weights), sizes, index), rtol=0, atol=1e-14)
    x = whole.clone().requires_grad_()
    part = uneven.split(x, group, dim=1, sizes=sizes, cause="t")
    assert torch.equal(part, _pieces(whole, sizes, index))
    (part * _pieces(weights[0], sizes, index)).sum().backward()
    assert torch.equal(x.grad, weights[0])
    x = (whole * (index + 1)).requires_grad_()
    part = uneven.scatter_sum(x, group, dim=1, sizes=sizes, cause="t")
    times = sum(range(1, group.size + 1))
    torch.testing.assert_close(part, _pieces(whole * times, sizes, index), rtol=0, atol=1e-13)
    (part * _pieces(weights[0], sizes, index)).sum().backward()
    assert torch.equal(x.grad, weights[0])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_pairs_with_uneven_chunks(ranks, size: int) -> None:
    ranks.run(_every_pair, size, CHUNKS[size])


def test_one_rank_passes_through(ranks) -> None:
    ranks.run(_every_pair, 1, (5,))


def _wrong_chunk(mesh) -> None:
    with pytest.raises(AssertionError, match=r"dim 0 of \(2,\) is not [31] \(chunks \(3, 1\)\)"):
        uneven.gather(torch.zeros(2), mesh.group("dp"), dim=0, sizes=(3, 1), cause="t")


def test_a_chunk_of_another_size_is_an_error(ranks) -> None:
    ranks.run(_wrong_chunk, 2)
