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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import ops
from meshwright.comm.ops import DataGroups, Group
from meshwright.errors import NumericsError, WorkerError
from meshwright.sharding.engine import ShardingEngine, ShardParameter
from meshwright.training.clip import clip_coefficient
from meshwright.training.state import TrainState

# Losses of ranks that compute the same thing may differ by so much, relative to their sum: rounding of other kernels.
_SAME_LOSS = 1e-4
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
        overflowed: whether it was left out because gradients overflowed under a loss scale, which is lower now.
        stop: whether some rank has been asked to stop after this step.
    """

    loss: float
    count: int
    grad_norm: float
    applied: bool
    scale: float
    overflowed: bool = False
    stop: bool = False


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of a step after its one small reduction.

    Attributes:
        loss_sum: sum of the loss over all micro-steps and ranks.
        count: of what was summed, the same way.
        norm: of the normalised gradient over all logical parameters, before clipping.
        correction: what the accumulated gradient must be multiplied by to be normalised: expected / global count, and
            by the loss scale where there is one.
        used: parameters that got a gradient on some rank.
        part_norms: as `norm`, over each of the parts that were asked for.
        stop: whether some rank has been asked to stop after this step.
    """

    loss_sum: float
    count: float
    norm: float
    correction: float
    used: frozenset[str]
    part_norms: tuple[float, ...] = ()
    stop: bool = False

    @property
    def loss(self) -> float:
        """Global sum / global count."""
        return self.loss_sum / self.count

    @property
    def is_finite(self) -> bool:
        """Whether loss and norm are numbers, so that the update may be made."""
        return math.isfinite(self.loss_sum) and math.isfinite(self.norm)

    @property
    def has_overflowed(self) -> bool:
        """Whether the gradient is not finite and the loss is: what a lower loss scale may cure."""
        return math.isfinite(self.loss_sum) and not math.isfinite(self.norm)

    def scale(self, clip_norm: float | None, *, norm: float | None = None) -> float:
        """The one factor that normalises the gradient and clips its norm, or that of a part; 0 where not finite."""
        limited = self.norm if norm is None else norm
        return clip_coefficient(limited, clip_norm) * self.correction if self.is_finite else 0.0


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

    With a loss scale, a step whose gradient overflows is left out and lowers the scale; the next step takes the next
    samples and the next learning rate.

    Args:
        state: what the step changes; `state.step` grows by one.
        micro_batch: micro-step number -> this rank's part of that micro-batch.
        loss: (model, batch) -> (sum, count).
        num_microbatches: micro-steps to accumulate.
        lr: learning rate of this step.
        clip_norm: limit of the global gradient norm, or None.

    Raises:
        NumericsError: E602 when the loss counted nothing on any rank, E603 when too many steps overflowed in a row.
        WorkerError: E404 when ranks issued different collectives.
    """
    agreed = accumulate(state, micro_batch, loss=loss, num_microbatches=num_microbatches)
    scale = agreed.scale(clip_norm)
    if agreed.is_finite:
        state.engine.group.log.progress("optimizer")
        state.engine.scale_gradients(scale)
        state.optimizer.step(lr=lr, used=agreed.used, parts=state.engine.updating())
        state.engine.finish_step()
    overflowed = state.loss_scale is not None and agreed.has_overflowed
    advance(state, agreed)
    return StepResult(
        agreed.loss, int(agreed.count), agreed.norm, agreed.is_finite, scale, overflowed, agreed.stop
    )


# The pieces of a step, which a user's own loop calls one by one.


def accumulate(
    state: TrainState,
    micro_batch: Callable[[int], Any],
    *,
    loss: Loss,
    num_microbatches: int,
    parts: Sequence[Sequence[ShardParameter]] = (),
) -> Agreed:
    """Forward and backward of all micro-steps, up to what the ranks agree on; the update is still to be made."""
    log = state.engine.group.log
    tally = start_step(state)
    if state.stages is not None:
        tally += state.stages.run(state.engine, micro_batch, divisor=state.divisor, step=state.step)
        return agree(state, tally, parts=parts)
    for microbatch in range(num_microbatches):
        log.progress("data")
        batch = micro_batch(microbatch)
        log.progress("forward and backward")
        with state.randomness(state.step, microbatch):
            state.engine.start_microbatch(last=microbatch == num_microbatches - 1)
            total, count = loss(state.engine.model, batch)
            with backward_phase(state.engine):
                if total.requires_grad:
                    (total / state.divisor).backward()
        tally += torch.tensor([float(total.detach()), float(count)], dtype=torch.float64)
    return agree(state, tally, parts=parts)


def start_step(state: TrainState) -> Tensor:
    """Forget the last step's gradients; an empty tally (loss sum, count), float64."""
    state.engine.group.log.progress("forward and backward", state.step)
    state.engine.start_step()
    return torch.zeros(2, dtype=torch.float64)


@contextmanager
def backward_phase(engine: ShardingEngine) -> Iterator[None]:
    """Around the backward of a micro-step, which ends with it."""
    engine.start_backward()
    yield
    engine.finish_microbatch()


def agree(state: TrainState, tally: Tensor, *, parts: Sequence[Sequence[ShardParameter]] = ()) -> Agreed:
    """End the forwards and backwards of a step by its one small reduction.

    Args:
        state: of the run; it does not change.
        tally: this rank's loss sum and count, float64 (2,).
        parts: pieces of parameters of which norms of their own are wanted.

    Raises:
        NumericsError: E602 when the loss counted nothing on any rank.
        WorkerError: E404 when ranks issued different collectives, E225 when those of a copy had other samples.
    """
    engine, group = state.engine, state.engine.group
    group.log.progress("step reduction")
    digests = [float(number) for digest in _digests(engine.groups) for number in (digest, digest * digest)]
    squares = [float(engine.norm_squared()), *(float(engine.norm_squared_of(part)) for part in parts)]
    head = [*tally.tolist(), *digests, *squares, float(state.stop_requested)]
    payload = torch.cat([torch.tensor(head, dtype=torch.float64), engine.used_mask()]).to(engine.device)
    ops.all_reduce(payload, group, cause="step reduction").wait()
    loss_sum, count, *rest = payload.tolist()
    digests, rest = rest[: len(digests)], rest[len(digests) :]
    squares, num_stops, mask = rest[: len(squares)], rest[len(squares)], rest[len(squares) + 1 :]
    _check_same_calls(engine.groups, digests)
    if engine.groups.model is not None:
        (loss_sum, count), squares, num_stops = _agree_on_model(
            engine, engine.groups.model, (loss_sum, count), squares, num_stops
        )
    if count <= 0:
        raise NumericsError(
            "E602",
            f"step {state.step}: the loss counted {count:g} elements over all ranks; every label is "
            f"ignored. Leave such batches out, or check the labels.",
        )
    correction = state.divisor / count
    norm, *part_norms = (math.sqrt(square) * correction for square in squares)
    used = frozenset(name for name, uses in zip(engine.parameter_names, mask, strict=True) if uses)
    return Agreed(loss_sum, count, norm, correction, used, tuple(part_norms), stop=num_stops > 0)


def advance(state: TrainState, agreed: Agreed) -> None:
    """Count a step that is over, whether or not it was applied, and move the loss scale.

    Raises:
        NumericsError: E603 when too many steps overflowed in a row.
    """
    if state.loss_scale is not None and math.isfinite(agreed.loss_sum):
        state.loss_scale = state.loss_scale.after(overflowed=agreed.has_overflowed)
        state.loss_scale.check(state.step)
    state.step += 1
    state.tokens += int(agreed.count)
    state.expected_count = agreed.count


def evaluate(engine: ShardingEngine, batches: Any, *, loss: Loss, group: Group | None = None) -> float:
    """Mean loss over `batches` of all ranks (of `group`), without gradients. Every rank has equally many batches."""
    engine.model.eval()
    local = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        with engine.evaluation():
            total, count = loss(engine.model, batch)
        local += torch.tensor([float(total), float(count)], dtype=torch.float64)
    engine.model.train()
    on_device = local.to(engine.device)
    ops.all_reduce(on_device, group or engine.group, cause="evaluation loss").wait()
    _share_last_stage(engine, on_device)
    total, count = on_device.tolist()
    return total / count if count else math.nan


def first_count(engine: ShardingEngine, batch: Any, *, loss: Loss, num_microbatches: int) -> float:
    """What the loss counts, over all ranks, in a step of micro-batches like `batch`: the first `expected_count`.

    With a loss scale the first backward must be about normalised, or it overflows. Every rank must call.
    """
    engine.model.eval()
    with engine.evaluation():
        _, count = loss(engine.model, batch)
    engine.model.train()
    total = torch.tensor([float(count)], dtype=torch.float64, device=engine.device)
    ops.all_reduce(total, engine.group, cause="first count").wait()
    _share_last_stage(engine, total)
    return max(1.0, float(total)) * num_microbatches


def _share_last_stage(engine: ShardingEngine, numbers: Tensor) -> None:
    """What the last stage has counted, on every stage; the others have zeros."""
    if engine.groups.pipeline is not None:
        if not engine.groups.speaks:
            numbers.zero_()
        ops.all_reduce(numbers, engine.groups.pipeline.all, cause="loss of the last stage").wait()


def no_samples(_model: Any, _batch: Any) -> tuple[Tensor, int]:
    """The loss of a rank that has no samples, a parameter server: nothing, and no gradient."""
    return torch.zeros(()), 0


def _agree_on_model(
    engine: ShardingEngine, group: Group, loss: tuple[float, float], squares: list[float], num_stops: float
) -> tuple[tuple[float, float], list[float], float]:
    """Loss sum and count, sums of squares and requests to stop over the parts of the model.

    Each logical element is in one of them. The loss is that of the ranks with the last stage, all others have none.

    Raises:
        WorkerError: E225 where the ranks of a copy had other samples or other weights, E404 other collectives.
    """
    digest = group.log.digest(group.axis)
    loss_sum, count = loss
    numbers = [loss_sum, loss_sum * loss_sum, count, *squares]
    if not engine.groups.speaks:
        numbers = [0.0] * len(numbers)
    numbers += [digest, digest * digest, num_stops, *_tensor_digests(engine.groups)]
    payload = torch.tensor(numbers, dtype=torch.float64, device=engine.device)
    ops.all_reduce(payload, group, cause="step reduction of the model").wait()
    total, total_square, count, *rest = payload.tolist()
    squares, (first, second, num_stops, *of_places) = rest[: len(squares)], rest[len(squares) :]
    alike = engine.groups.num_alike
    if alike * total_square - total * total > (_SAME_LOSS * total) ** 2:
        raise WorkerError(
            "E225",
            f"ranks {', '.join(map(str, group.ranks))} hold one copy of the model and got different losses (rank "
            f"{group.log.rank}: {loss_sum:.6g}, mean {total / alike:.6g}): they must read the same samples, and "
            f"weights that each of them holds must be the same. Check that data and loss do not depend on the rank.",
        )
    _check_equal(group, group.size, int(first), int(second))
    if of_places and engine.groups.tensor is not None:
        tensor = engine.groups.tensor
        for first, second in zip(of_places[::2], of_places[1::2], strict=True):
            _check_equal(tensor, tensor.size, int(first), int(second))
    return (total / alike, count / alike), squares, num_stops


def _tensor_digests(groups: DataGroups) -> list[float]:
    """What this rank has issued over tp, and its square, at its place of the pipeline among zeros for the others.

    Without a pipeline what is compared over the ranks of a copy says it already.
    """
    if groups.pipeline is None or groups.tensor is None:
        return []
    digest = groups.tensor.log.digest(groups.tensor.axis)
    numbers = [0.0] * (2 * groups.pipeline.all.size)
    place = 2 * groups.pipeline.index
    numbers[place : place + 2] = [float(digest), float(digest * digest)]
    return numbers


def _digests(groups: DataGroups) -> list[int]:
    """What this rank has issued: over the data-parallel ranks, and with servers over the workers alone."""
    log = groups.all.log
    if not groups.num_servers:
        return [log.digest(*groups.axes)]
    return [log.digest(*groups.axes), 0 if groups.is_server else log.digest(groups.workers.axis)]


def _check_same_calls(groups: DataGroups, sums: Sequence[float]) -> None:
    """Numbers are all equal exactly when n times the sum of squares is the square of the sum."""
    sizes = (groups.all.size, groups.num_workers)
    for size, first, second in zip(sizes, sums[::2], sums[1::2], strict=False):
        _check_equal(groups.all, size, int(first), int(second))


def _check_equal(group: Group, size: int, digest_sum: int, digest_square_sum: int) -> None:
    if size * digest_square_sum == digest_sum * digest_sum:
        return
    log = group.log
    last = log.events()[-1]
    raise WorkerError(
        "E404",
        f"ranks of {group.axis} issued different collectives before {last.describe()} on rank {log.rank}: "
        f"some rank ran other modules than its peers, or dropped elements of samples of another shape. "
        f"Every rank must run the same blocks in every micro-batch.",
    )
