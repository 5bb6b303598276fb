"""Batch normalisation whose statistics are those of the global micro-step, on CPUs and GPUs.

Every plain BatchNorm1d, 2d, 3d and SyncBatchNorm of a model normalises, in training, by the mean and variance over the
samples of all data ranks, however unevenly they are spread; one all-reduce forward (two for float64) and one
backward. Running statistics change once a forward, and not again when backward recomputes it. In evaluation
mode torch's own code runs.

[Note: one sum] Each rank sends (sum, sum of squares, count) per channel, in float64: they are made from the local
mean and centred squares, so that what cancels afterwards cancels in float64 only. A float32 variance is good to
1e-7 while |mean| < 1e4 x deviation. A float64 input has no digits to spare: its mean is agreed first, and then the
squares around it.

Limits: every rank must run the same layers in the same order; no double backward on several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.comm import ops
from meshwright.comm.ops import Group

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
# Which numbers of dims each class takes; SyncBatchNorm any from 2.
_DIMS: Mapping[type[nn.Module], tuple[int, ...]] = MappingProxyType(
    {
        nn.BatchNorm1d: (2, 3),
        nn.BatchNorm2d: (4,),
        nn.BatchNorm3d: (5,),
        nn.SyncBatchNorm: tuple(range(2, 65)),
    }
)


@dataclass(frozen=True)
class GroupOnPaper:
    """Ranks that are not there, for runs without memory: sums over them are this rank's own."""

    size: int
    axis: str = "dp"


def install(model: nn.Module, group: Group | GroupOnPaper) -> Callable[[], None]:
    """Synchronise every batch normalisation of `model` over `group`; subclasses and replaced forwards stay.

    Returns:
        A function that undoes it.
    """
    adapted = find_batch_norms(model)
    for module in adapted:
        # An attribute of the instance; the class keeps its method.
        vars(module)["forward"] = partial(_forward, module, group)

    def undo() -> None:
        for module in adapted:
            del vars(module)["forward"]

    return undo


def find_batch_norms(model: nn.Module) -> list[BatchNorm]:
    """Modules of exactly the known classes whose `forward` is their class's."""
    return [
        cast(BatchNorm, module)
        for module in model.modules()
        if type(module) in _DIMS and "forward" not in vars(module)
    ]


def micro_step_warnings(model: nn.Module, *, num_microbatches: int) -> list[str]:
    """W205 where accumulation changes what batch statistics are taken over."""
    training = [module for module in find_batch_norms(model) if module.training]
    if num_microbatches == 1 or not training:
        return []
    return [
        f"W205 batch normalisation ({len(training)} modules) takes the statistics of one micro-step: with "
        f"{num_microbatches} of them a step the model is another one than with 1. For the same model at any "
        f"memory, keep their number and change the number of ranks."
    ]


def _forward(module: BatchNorm, group: Group | GroupOnPaper, x: Tensor) -> Tensor:
    # Private, as torch.utils.checkpoint has it: nothing public tells backward from forward (guarded by a test).
    recomputes = torch._C._current_graph_task_id() != -1
    if not module.training or (group.size == 1 and not recomputes):
        return nn.BatchNorm1d.forward(cast(nn.BatchNorm1d, module), x)  # the forward that all of them inherit
    if group.size == 1:
        # Copies, so that autograd saves as many tensors as in the forward.
        mean, var = (None if r is None else r.clone() for r in (module.running_mean, module.running_var))
        return F.batch_norm(x, mean, var, module.weight, module.bias, True, 0.0, module.eps)
    if x.dim() not in _DIMS[type(module)]:
        legal = " or ".join(f"{dim}D" for dim in _DIMS[type(module)][:2])
        raise ValueError(f"{type(module).__name__} expected {legal} input (got {x.dim()}D input)")
    y, mean, var, count = _SyncedNorm.apply(x, module.weight, module.bias, module.eps, group)
    if not recomputes:
        _update(module, mean, var * (count / (count - 1)))
    return y


@torch.no_grad()
def _update(module: BatchNorm, mean: Tensor, unbiased_var: Tensor) -> None:
    """Move the running statistics, if there are any, as torch does."""
    if module.running_mean is None or module.running_var is None:
        return
    assert module.num_batches_tracked is not None, "running statistics come with their counter"
    module.num_batches_tracked.add_(1)
    cumulative = 1.0 / module.num_batches_tracked.double()
    weight = cumulative if module.momentum is None else torch.full_like(cumulative, module.momentum)
    for running, new in ((module.running_mean, mean), (module.running_var, unbiased_var)):
        running.lerp_(new.to(running.dtype), weight.to(running.dtype))


def _reduced_dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _high(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _local_statistics(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance per channel `(C,)`, at least float32, and elements per channel."""
    var, mean = torch.var_mean(_high(x.detach()), _reduced_dims(x), correction=0)
    return mean, var, x.numel() // x.shape[1]


def num_sums(x: Tensor) -> int:
    """All-reduces that the forward of an input takes on several ranks; see [Note: one sum]."""
    return 2 if x.dtype == torch.float64 else 1


def _sum(values: Tensor, group: Group | GroupOnPaper, *, cause: str) -> None:
    if not isinstance(group, GroupOnPaper):
        ops.all_reduce(values, group, cause=cause).wait()


def _global_statistics(x: Tensor, group: Group | GroupOnPaper) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance `(C,)` float64 over all ranks, and elements per channel `()`; see [Note: one sum]."""
    mean, var, count = _local_statistics(x)
    mean, var, counts = mean.double(), var.double(), mean.new_full((1,), count, dtype=torch.float64)
    if num_sums(x) == 2:
        return _two_sums(mean, var, counts, group)
    sums = torch.cat([mean * count, (var + mean * mean) * count, counts])
    _sum(sums, group, cause="batch statistics")
    total = sums[-1]
    mean, square = (sums[:-1] / total).chunk(2)
    return mean, (square - mean * mean).clamp_min_(0.0), total


def _two_sums(
    mean: Tensor, var: Tensor, count: Tensor, group: Group | GroupOnPaper
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in two all-reduces, without cancellation."""
    sums = torch.cat([mean * count, count])
    _sum(sums, group, cause="batch means")
    total = sums[-1]
    global_mean = sums[:-1] / total
    squares = (var + (mean - global_mean).square()) * count
    _sum(squares, group, cause="batch statistics")
    return global_mean, squares / total, total


class _SyncedNorm(torch.autograd.Function):
    """(x, weight, bias) -> (normalised x, global mean, biased variance, count)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: Group | GroupOnPaper,
    ) -> tuple[Tensor, ...]:
        mean, var, count = _global_statistics(x, group)
        # The count is known to be enough where this rank alone has it; asking costs a wait for a GPU.
        if x.numel() // x.shape[1] <= 1 and float(count) <= 1:
            raise ValueError(
                f"batch statistics need more than 1 value per channel over all ranks of {group.axis}, got input "
                f"of size {tuple(x.shape)}"
            )
        values = _high(x)
        inverse = (var + eps).rsqrt().to(values.dtype)
        scale = inverse if weight is None else inverse * weight
        shape = [1, -1] + [1] * (x.dim() - 2)
        y = (values - mean.to(values.dtype).view(shape)) * scale.view(shape)
        y = y if bias is None else y.add_(bias.view(shape))
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.group, ctx.has_bias = group, bias is not None
        ctx.mark_non_differentiable(mean, var, count)
        return y.to(x.dtype), mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        dims, shape = _reduced_dims(x), [1, -1] + [1] * (x.dim() - 2)
        grad, values = _high(grads[0]), _high(x)
        normalised = (values - mean.to(values.dtype).view(shape)) * inverse.view(shape)
        sum_grad, sum_product = grad.sum(dims), (grad * normalised).sum(dims)
        grad_x = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([sum_grad, sum_product]).double()
            _sum(sums, ctx.group, cause="batch statistics gradient")
            mean_grad, mean_product = (part.view(shape) for part in (sums / count).to(grad.dtype).chunk(2))
            scale = inverse if weight is None else inverse * weight
            grad_x = (grad - mean_grad - normalised * mean_product).mul_(scale.view(shape)).to(x.dtype)
        grad_weight = sum_product.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        grad_bias = sum_grad.to(grad.dtype) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None
