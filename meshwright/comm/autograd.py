"""Differentiable communication: each forward operation with the one that its gradient needs.

| forward | backward | used for |
|---|---|---|
| `copy` (identity) | all-reduce | the input of a column-parallel product |
| `reduce` (all-reduce) | identity | the output of a row-parallel product |
| `gather` (all-gather along a dim) | this rank's slice | outputs whose later use is replicated |
| `split` (this rank's slice) | all-gather | entering a region that is cut along a dim |
| `gather_sum` (all-gather) | reduce-scatter | sequence parallel: entering a product |
| `scatter_sum` (reduce-scatter) | all-gather | sequence parallel: leaving a product |
| `exchange` (all-to-all) | all-to-all with the dims swapped | Ulysses |

The pairs are the conjugate operations of Megatron-LM (arXiv 1909.08053, section 3; 2205.05198, section 4.2).
Dims that the group's size does not divide are refused here; layers pad before they call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.comm import ops
from meshwright.comm.ops import Group


def _all_reduced(x: Tensor, group: Group, cause: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    ops.all_reduce(total, group, cause=cause).wait()
    return total


def _gathered(x: Tensor, dim: int, group: Group, cause: str) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    whole = front.new_empty((front.shape[0] * group.size, *front.shape[1:]))
    ops.all_gather(whole.view(-1), front.view(-1), group, cause=cause).wait()
    return whole.movedim(0, dim)


def _scattered(x: Tensor, dim: int, group: Group, cause: str) -> Tensor:
    _check_divides(x, dim, group)
    front = x.movedim(dim, 0).contiguous()
    part = front.new_empty((front.shape[0] // group.size, *front.shape[1:]))
    ops.reduce_scatter(part.view(-1), front.view(-1), group, cause=cause).wait()
    return part.movedim(0, dim)


def _sliced(x: Tensor, dim: int, group: Group) -> Tensor:
    _check_divides(x, dim, group)
    return x.chunk(group.size, dim)[group.index].contiguous()


def _exchanged(x: Tensor, split_dim: int, concat_dim: int, group: Group, cause: str) -> Tensor:
    _check_divides(x, split_dim, group)
    source = torch.stack(x.chunk(group.size, split_dim)).contiguous()
    output = torch.empty_like(source)
    ops.all_to_all(output, source, group, cause=cause).wait()
    return torch.cat(tuple(output), concat_dim)


def _check_divides(x: Tensor, dim: int, group: Group) -> None:
    assert x.shape[dim] % group.size == 0, (
        f"dim {dim} of shape {tuple(x.shape)} does not divide by {group.size} ranks of {group.axis}"
    )


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, cause: str) -> Tensor:
        ctx.args = (group, cause)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_reduced(grads[0], *ctx.args), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, cause: str, in_place: bool) -> Tensor:
        if not in_place or not x.is_contiguous():
            return _all_reduced(x, group, cause)
        ctx.mark_dirty(x)
        ops.all_reduce(x, group, cause=cause).wait()
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, cause: str) -> Tensor:
        ctx.args = (dim, group)
        return _gathered(x, dim, group, cause)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _sliced(grads[0], *ctx.args), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, cause: str) -> Tensor:
        ctx.args = (dim, group, cause)
        return _sliced(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(grads[0], *ctx.args), None, None, None


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, cause: str) -> Tensor:
        ctx.args = (dim, group, cause)
        return _gathered(x, dim, group, cause)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _scattered(grads[0], *ctx.args), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, cause: str) -> Tensor:
        ctx.args = (dim, group, cause)
        return _scattered(x, dim, group, cause)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(grads[0], *ctx.args), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[int, int], group: Group, cause: str) -> Tensor:
        ctx.args = (dims[1], dims[0], group, cause)
        return _exchanged(x, *dims, group, cause)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grads[0], *ctx.args), None, None, None


def copy(x: Tensor, group: Group, *, cause: str) -> Tensor:
    """Identity forward, all-reduce backward."""
    return _Copy.apply(x, group, cause)


def reduce(x: Tensor, group: Group, *, cause: str, in_place: bool = False) -> Tensor:
    """All-reduce forward, identity backward; `in_place` for an x that nobody else reads, such as a fresh product."""
    return _Reduce.apply(x, group, cause, in_place)


def gather(x: Tensor, group: Group, *, dim: int, cause: str) -> Tensor:
    """All-gather along `dim` forward, this rank's slice backward."""
    return _Gather.apply(x, dim, group, cause)


def split(x: Tensor, group: Group, *, dim: int, cause: str) -> Tensor:
    """This rank's slice of `dim` forward, all-gather backward."""
    return _Split.apply(x, dim, group, cause)


def gather_sum(x: Tensor, group: Group, *, dim: int, cause: str) -> Tensor:
    """All-gather along `dim` forward, reduce-scatter backward."""
    return _GatherSum.apply(x, dim, group, cause)


def scatter_sum(x: Tensor, group: Group, *, dim: int, cause: str) -> Tensor:
    """Reduce-scatter along `dim` forward, all-gather backward."""
    return _ScatterSum.apply(x, dim, group, cause)


def exchange(x: Tensor, group: Group, *, split_dim: int, concat_dim: int, cause: str) -> Tensor:
    """All-to-all: cut `split_dim` over the group, concatenate `concat_dim`; the reverse backward."""
    return _Exchange.apply(x, (split_dim, concat_dim), group, cause)
