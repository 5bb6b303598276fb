"""The training step: the only one, for every layout.

The normaliser law lives here. A loss is a pair (sum, count), and the gradient is that of global sum / global count over
all micro-steps and data ranks. The global count is only known after the forwards, so backward runs on sum / expected
count (the last step's, the same number on every rank and mesh), and one pass over the gradient corrects the rest and
clips; where neither is needed, the pass is left out.

Everything that ranks must agree on travels in one small float64 all-reduce a step: loss sum, count, squared norm,
the mask of used parameters, and a digest of every collective issued so far. If the digests differ, some ranks ran
different collectives, and whatever they computed is wrong: the step raises instead of going on silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import ops
from meshwright.comm.ops import Group
from meshwright.errors import NumericsError, WorkerError
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.clip import clip_coefficient
from meshwright.training.state import TrainState

# (model, batch) -> (sum over the batch as a 0-dim tensor, number of things summed)
Loss = Callable[[Any, Any], tuple[Tensor, Any]]


@dataclass(frozen=True)
class StepResult:
    """What one step did, the same on every rank.

    Attributes:
        loss: global sum / global count.
        count: things that the loss counted, e.g. valid tokens.
        grad_norm: norm of the normalised gradient over all logical parameters, before clipping.
        applied: False when the loss or the norm was not finite and the update was left out.
        scale: factor by which the accumulated gradient was multiplied: clip coefficient x expected / global count.
    """

    loss: float
    count: int
    grad_norm: float
    applied: bool
    scale: float


@dataclass(frozen=True)
class _Agreed:
    loss_sum: float
    count: float
    norm_squared: float
    used: set[str]


def train_step(
    state: TrainState,
    micro_batch: Callable[[int], Any],
    *,
    loss: Loss,
    num_microbatches: int,
    lr: float,
    clip_norm: float | None,
) -> StepResult:
    """Run one optimizer step.

    Args:
        state: what the step changes; `state.step` grows by one.
        micro_batch: micro-step number -> this rank's part of that micro-batch.
        loss: (model, batch) -> (sum, count).
        num_microbatches: micro-steps to accumulate.
        lr: learning rate of this step.
        clip_norm: limit of the global gradient norm, or None.

    Raises:
        NumericsError: E602 when the loss counted nothing on any rank.
        WorkerError: E404 when ranks issued different collectives.
    """
    engine, log = state.engine, state.engine.group.log
    log.progress("forward and backward", state.step)
    engine.start_step()
    local = torch.zeros(2, dtype=torch.float64)
    for microbatch in range(num_microbatches):
        log.progress("data")
        batch = micro_batch(microbatch)
        log.progress("forward and backward")
        last = microbatch == num_microbatches - 1
        with state.randomness(state.step, microbatch):
            local += _accumulate(engine, loss, batch, divisor=state.expected_count, last=last)
    log.progress("step reduction")
    agreed = _agree(engine, local)
    if agreed.count <= 0:
        raise NumericsError(
            "E602",
            f"step {state.step}: the loss counted {agreed.count:g} elements over all ranks; every label is "
            f"ignored. Leave such batches out, or check the labels.",
        )
    correction = state.expected_count / agreed.count
    norm = math.sqrt(agreed.norm_squared) * correction
    applied = math.isfinite(agreed.loss_sum) and math.isfinite(norm)
    scale = clip_coefficient(norm, clip_norm) * correction if applied else 0.0
    if applied:
        log.progress("optimizer")
        engine.scale_gradients(scale)
        state.optimizer.step(lr=lr, used=agreed.used)
        engine.finish_step()
    state.step += 1
    state.tokens += int(agreed.count)
    state.expected_count = agreed.count
    return StepResult(agreed.loss_sum / agreed.count, int(agreed.count), norm, applied, scale)


def evaluate(engine: ShardingEngine, batches: Any, *, loss: Loss) -> float:
    """Mean loss over `batches` of all ranks, without gradients. Every rank has equally many batches."""
    engine.model.eval()
    local = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        with engine.evaluation():
            total, count = loss(engine.model, batch)
        local += torch.tensor([float(total), float(count)], dtype=torch.float64)
    engine.model.train()
    on_device = local.to(engine.device)
    ops.all_reduce(on_device, engine.group, cause="evaluation loss").wait()
    total, count = on_device.tolist()
    return total / count if count else math.nan


def _accumulate(engine: ShardingEngine, loss: Loss, batch: Any, *, divisor: float, last: bool) -> Tensor:
    """Forward and backward of one micro-batch; returns (sum, count) of this rank."""
    engine.start_microbatch(last=last)
    total, count = loss(engine.model, batch)
    engine.start_backward()
    if total.requires_grad:
        (total / divisor).backward()
    engine.finish_microbatch()
    return torch.tensor([float(total.detach()), float(count)], dtype=torch.float64)


def _agree(engine: ShardingEngine, local: Tensor) -> _Agreed:
    """The one small reduction of a step."""
    group = engine.group
    digest = group.log.digest(*engine.groups.axes)
    head = [*local.tolist(), float(engine.norm_squared()), float(digest), float(digest * digest)]
    payload = torch.cat([torch.tensor(head, dtype=torch.float64), engine.used_mask()]).to(engine.device)
    ops.all_reduce(payload, group, cause="step reduction").wait()
    values = payload.tolist()
    _check_same_calls(group, int(values[3]), int(values[4]))
    mask = zip(engine.parameter_names, values[5:], strict=True)
    return _Agreed(values[0], values[1], values[2], {name for name, uses in mask if uses})


def _check_same_calls(group: Group, digest_sum: int, digest_square_sum: int) -> None:
    """Numbers are all equal exactly when n times the sum of squares is the square of the sum."""
    if group.size * digest_square_sum != digest_sum * digest_sum:
        last = group.log.events()[-1]
        raise WorkerError(
            "E404",
            f"ranks of {group.axis} issued different collectives before {last.describe()} on rank {group.log.rank}: "
            f"some rank ran other modules than its peers, or dropped elements of samples of another shape. "
            f"Every rank must run the same blocks in every micro-batch.",
        )
