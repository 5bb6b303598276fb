"""A user's own loop over the pieces of the training step, called when the user's lines run.

Owns what a sharded model looks like from outside, when a step of it begins and ends, and the rules of use (E7xx).
Must not know optimizers' rules (`own_optimizer.py`), data or files. Forward, backward, reduction and update are those
of `step.py` and the engine: there is no second path.

[Note: gradients] A block `with model.accumulate(n):` is one step: it forgets older gradients and holds n micro-steps.
Gradients leave `p.grad` of the module's parameters as they arrive, for flat memory that may be sharded; the parameters
in the optimizer's groups, this rank's pieces, show them from the end of the block until the update. They are
normalised: a bare `loss.backward()` is the mean over this rank's samples, and every rank and micro-step has equally
many, so the gradient is the mean over ranks and micro-steps; `model.backward(total, count)` is divided by the global
count.

Simplifications: random numbers follow the law inside the model's forward only; the user's own lines draw torch's. The
samples of a forward are counted by the first dim of its first tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.adapt.context_parallel import ContextScope
from meshwright.data.index_law import BatchGeometry
from meshwright.errors import LoopError, NumericsError, PlanError
from meshwright.nested import tensors_in
from meshwright.sharding.engine import ShardParameter
from meshwright.training.nonfinite import explain_not_finite
from meshwright.training.normaliser import checked_loss
from meshwright.training.own_stages import OwnStages, no_forward
from meshwright.training.own_step import (
    LoopRules,
    OpenStep,
    Part,
    StepBatch,
    StepGradients,
)
from meshwright.training.passes import loss_of_rank, surround_passes
from meshwright.training.plain_state import load_plain_state, stream_state
from meshwright.training.randomness import StatelessDraws
from meshwright.training.state import TrainState
from meshwright.training.step import (
    Agreed,
    Loss,
    StepResult,
    accumulate,
    advance,
    agree,
    first_count,
)
from meshwright.training.tree import leading_size

# A count in float64 that went through one division and one multiplication.
_ROUNDING = 1e-9


class ShardedModel:
    """A module, sharded by the plan: call it, step it, or run its forwards and backwards in a loop of your own.

    Attributes and methods of the module are reached through it: `model.encode(x)` runs as `model(x)` does.

    Attributes:
        state: what steps change.
        module: the user's module, its class unchanged.
        result: what the newest step did, the same on every rank; None before the first.
        parts: the parameters of each optimizer, in the order in which they were made.
        optimizers: these optimizers.
        rules: of its steps.
    """

    def __init__(
        self,
        state: TrainState,
        *,
        rules: LoopRules,
        loss: Callable[[Any, Any], Any] | None,
        siblings: list[ShardedModel],
        context: ContextScope | None = None,
        stages: OwnStages | None = None,
    ) -> None:
        self.state = state
        self.module: nn.Module = state.engine.model
        self.result: StepResult | None = None
        self.parts: list[Part] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._engine = state.engine
        self.rules = rules
        self._stages = stages
        executor = None if stages is None else stages.executor(1)  # of evaluations before the first step
        surround_passes(state, None, context, executor)
        self._user_loss = None if loss is None else loss_of_rank(loss, context, executor)
        self._context = context
        self._loss: Loss | None = None
        self._siblings = siblings
        self._block: OpenStep | None = None
        self._gradients: StepGradients | None = None
        self._is_closed = False

    # The module.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward: inside `accumulate`, or under `torch.no_grad()` for an evaluation."""
        return self._run(self.module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # not there yet: only while the constructor runs
            raise AttributeError(name)
        value = getattr(self.module, name)
        if not inspect.ismethod(value) or value.__func__ is getattr(nn.Module, name, None):
            return value
        return lambda *args, **kwargs: self._run(value, args, kwargs)

    def train(self, mode: bool = True) -> ShardedModel:
        """As `nn.Module.train`."""
        self.module.train(mode)
        return self

    def eval(self) -> ShardedModel:
        """As `nn.Module.eval`."""
        return self.train(False)

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters and persistent buffers, whole and on the CPU, on rank 0; empty elsewhere. Every rank calls.

        Values are those that optimizers update: float32 where the model computes in 16 bits.
        """
        return {name: value for name, value in stream_state(self.state) if value is not None}

    def load_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Take the values of a plain state dict; every rank calls, with all of it (`torch.load(..., mmap=True)`).

        Raises:
            CheckpointError: E501 where names or shapes are not the model's.
        """
        load_plain_state(self._engine, values)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_job()
        self._check_whole("a forward of your own")
        block = self._block
        if block is not None and not block.is_complete:
            with block.forward(leading_size((args, kwargs))):
                output = function(*args, **kwargs)
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._check_gradient)
            return output
        if torch.is_grad_enabled():
            raise LoopError(
                "E701",
                f"{type(self.module).__name__} runs with gradients outside of a step, where no backward could follow. "
                f"Train inside `with model.accumulate():` (one backward each micro-step); evaluate under "
                f"torch.no_grad().",
            )
        with self._engine.evaluation():
            return function(*args, **kwargs)

    def _check_gradient(self, _gradient: Tensor) -> None:
        if self._block is None or self._block.is_complete:
            raise LoopError(
                "E701",
                f"a gradient is asked of {type(self.module).__name__} outside of a step: call backward() and "
                f"torch.autograd.grad inside `with model.accumulate():`, as often as it says.",
            )

    def _must_agree(self, line: str) -> None:
        self._engine.group.log.must_agree(self._engine.group.axis, line)

    # A step in one call.

    @property
    def loss(self) -> Loss:
        """The loss that `build` was given, as (sum, count) once a step has tested it."""
        if self._loss is not None:
            return self._loss
        if self._user_loss is None:
            raise LoopError(
                "E701",
                "the model was built without a loss: job.build(build, loss=loss), loss(model, batch) -> (sum, count); "
                "or run `with model.accumulate():` with a loss of your own.",
            )
        return self._user_loss

    def step(self, batch: Any) -> float:
        """Forward and backward of a step, accumulation included; `step()` of the optimizer follows.

        Args:
            batch: of `job.batches`; or any batch: this rank's samples of the one micro-step, as many on every rank;
                ranks that share sequences (plan.cp) give the same ones, whole.

        Returns:
            The loss: global sum / global count, the same on every rank.

        Raises:
            NumericsError: E601 when loss or gradient is not finite; the step is left out. E602 when nothing counted.
            ConfigError: E111, E112 about what the loss returns.
            LoopError: E701, E703 for a call at the wrong time.
        """
        self._begin()
        groups, context = self._engine.groups, self._context
        if not isinstance(batch, StepBatch):
            rows, readers = leading_size(batch) or 1, groups.num_readers
            geometry = BatchGeometry(rows * readers, dp_size=readers, dp_rank=groups.reader_index)
            batch = StepBatch(geometry, partial(_whole, batch))
        draws = None
        if self.rules.dropout == "stateless":
            draws = StatelessDraws(
                batch.geometry,
                seed=self.rules.seed,
                must_agree=self._must_agree,
                region=self._engine.region,
                sequence=None if context is None else context.region,
            )
        executor = None if self._stages is None else self._stages.executor(len(batch))
        self.state.stages = executor
        surround_passes(self.state, draws, context, executor)
        if self._loss is None:
            loss, is_pair = self.loss, executor is not None
            self._loss = loss if is_pair else checked_loss(self._engine, loss, batch.trial())
            if self.state.loss_scale is not None:
                self.state.expected_count = first_count(
                    self._engine, batch[0], loss=self._loss, num_microbatches=len(batch)
                )
        agreed = accumulate(
            self.state,
            batch.__getitem__,
            loss=self._loss,
            num_microbatches=len(batch),
            parts=self._partial_shards(),
        )
        self._gradients = StepGradients(torch.empty(0), self.rules.clip_norm, agreed=agreed)
        if not agreed.is_finite and not self._overflowed(agreed):
            self._drop(agreed)
            step = self.state.step - 1
            raise explain_not_finite(self._engine, self._replayed(batch, step), loss=self._loss, step=step)
        self._show_gradients()
        return agreed.loss

    def _replayed(self, batch: StepBatch, step: int) -> Iterator[Any]:
        for number in range(len(batch)):
            micro_batch = batch[number]
            with self.state.randomness(step, number):
                yield micro_batch

    # A step in the user's own lines.

    @contextmanager
    def accumulate(self, num_microbatches: int = 1, *, backwards: int = 1) -> Iterator[ShardedModel]:
        """One step of `num_microbatches` micro-steps, each with `backwards` calls of backward; see [Note: gradients].

        Args:
            num_microbatches: the gradient is the mean over so many.
            backwards: calls of `loss.backward()` a micro-step, whose gradients add up. Reductions start during the
                very last one.

        Raises:
            LoopError: E701 inside another block, E702 when another number of calls came, E703 when the gradients of the
                step before were never used.
            PlanError: E237 with plan.pp, E255 with plan.cp.
        """
        self._check_whole("model.accumulate()")
        if num_microbatches < 1 or backwards < 1:
            raise LoopError(
                "E702", f"accumulate({num_microbatches}, backwards={backwards}): both are 1 or more"
            )
        if self._context is not None:
            raise PlanError(
                "E255",
                f"plan.cp = {self._context.group.size} with model.accumulate() is not built: nothing cuts a batch "
                f"there. Give build a loss that returns (sum, count) and call model.step(batch), or set plan.cp=1.",
            )
        self._begin()
        step = OpenStep(self.state, self.rules, num_microbatches=num_microbatches, backwards=backwards)
        self._block = step
        try:
            with step.watch:
                yield self
        finally:
            self._block = None
        self._gradients = step.finish(self.rules.clip_norm)
        self._show_gradients()

    def backward(self, total: Tensor, count: Any) -> None:
        """Backward of a sum over `count` things on this rank; the gradient is divided by the global count.

        Args:
            total: 0-dim sum over this rank's part, e.g. over valid tokens.
            count: how many were summed; it may be 0 and differ between ranks.
        """
        if self._block is None:
            raise LoopError(
                "E701", "model.backward() outside of `with model.accumulate():`, where a step begins"
            )
        self._block.run_sum(total, count)

    def clip_grad_norm(self, limit: float) -> float:
        """Clip the gradient of this step by its norm over all parameters; the norm before, the same on every rank.

        It takes the place of the job's clip_norm for this step, and acts when the optimizer makes its update.
        """
        gradients = self._need_gradients("clip_grad_norm()")
        agreed = self._agree(gradients)
        gradients.limit = limit
        return agreed.norm

    # The update, made by an optimizer that `own_optimizer.py` ties to this model.

    def start_update(self, part: Part) -> None:
        """Before an optimizer's update of `part`: agree, normalise and clip its gradients."""
        gradients = self._need_gradients("step()")
        if part in gradients.stepped:
            raise LoopError(
                "E703",
                "step() for the second time on the same gradients; one accumulate() or model.step() each",
            )
        agreed = self._agree(gradients)
        norm = agreed.norm if part.is_all else agreed.part_norms[self.parts.index(part)]
        scale = agreed.scale(gradients.limit, norm=norm)
        self._engine.group.log.progress("optimizer")
        self._engine.await_gradients()
        if part.is_all:
            self._engine.scale_gradients(scale)
        elif scale != 1.0:
            for shard in part.shards:
                shard.gradient.mul_(scale)
        part.flag.grad = None
        used = agreed.used if agreed.is_finite else frozenset()
        for shard in part.shards:
            shard.parameter.grad = shard.gradient if shard.name in used else None
        self.result = _result(agreed, norm, scale, overflowed=self._overflowed(agreed))

    def finish_update(self, part: Part) -> None:
        """After it: hand the new weights to all ranks, and forget the gradients."""
        gradients = self._gradients
        assert gradients is not None, "finish_update without start_update"
        assert gradients.agreed is not None, "finish_update without start_update"
        if not gradients.stepped:
            self._engine.finish_step()
            advance(self.state, gradients.agreed)
        else:
            self._engine.publish_masters()
        gradients.stepped.append(part)
        for shard in part.shards:
            shard.parameter.grad = None

    def _overflowed(self, agreed: Agreed) -> bool:
        """Whether the step is left out and only moves fp16's loss scale."""
        return self.state.loss_scale is not None and agreed.has_overflowed

    def _partial_shards(self) -> list[tuple[ShardParameter, ...]]:
        return [part.shards for part in self.parts if not part.is_all]

    def _agree(self, gradients: StepGradients) -> Agreed:
        if gradients.agreed is None:
            agreed = agree(self.state, gradients.tally, parts=self._partial_shards())
            if gradients.kind == "mean" and abs(self.state.expected_count / agreed.count - 1) > _ROUNDING:
                raise LoopError(
                    "E704",
                    f"loss.backward() is a mean over equally many samples on every rank and micro-step, but rank "
                    f"{self._rank} expected {self.state.expected_count:g} in this step and all ranks had "
                    f"{agreed.count:g}. Give every rank as many, or call model.backward(total, count).",
                )
            gradients.agreed = agreed
            if not agreed.is_finite and not self._overflowed(agreed):
                self._drop(agreed)
                raise NumericsError(
                    "E601",
                    f"loss or gradient is not finite at step {self.state.step - 1} (loss {agreed.loss:g}, gradient "
                    f"norm {agreed.norm:g}). Step skipped, not applied. Lower the learning rate, or look at the "
                    f"samples of this step.",
                )
        return gradients.agreed

    # Rules.

    def _check_whole(self, what: str) -> None:
        if self._stages is not None:
            along = self._engine.groups.pipeline
            assert along is not None, "stages have ranks along them"
            raise no_forward(self.module, along.all.size, what)

    @property
    def _rank(self) -> int:
        return self._engine.group.log.rank

    def _check_job(self) -> None:
        if self._is_closed:
            raise LoopError(
                "E705",
                f"{type(self.module).__name__} is used after its job ended; stay inside `with meshwright.job():`",
            )

    def check_between_steps(self, what: str) -> None:
        """Raise E707 inside a block, or where gradients still wait for their update."""
        self._check_job()
        waiting = self._gradients is not None and not self._gradients.stepped and self._are_shown()
        if self._block is not None or waiting:
            raise LoopError("E707", f"{what} in the middle of a step; it comes after the optimizer's step()")

    def close(self) -> None:
        """The job has ended."""
        self._is_closed = True

    def _begin(self) -> None:
        self._check_job()
        if any(model._block is not None for model in (self, *self._siblings)):
            raise LoopError(
                "E701",
                "a step begins inside another `with model.accumulate():`. Modules that train together are parts of one "
                'module: build both in one, and give each its optimizer with only="name.*".',
            )
        gradients = self._gradients
        if gradients is not None and not gradients.stepped and self._are_shown():
            raise LoopError(
                "E703",
                "the gradients of the step before were never used: step() of an optimizer made by job.optimizer comes "
                "after each accumulate() or model.step(). (An optimizer over model.parameters() updates nothing.) To "
                "leave a step out, call zero_grad().",
            )
        self._gradients = None

    def _need_gradients(self, what: str) -> StepGradients:
        self._check_job()
        gradients = self._gradients
        if self._block is not None:
            raise LoopError("E703", f"{what} inside `with model.accumulate():`; it comes after the block")
        if gradients is None or (not gradients.stepped and not self._are_shown()):
            raise LoopError(
                "E703",
                f"{what} without new gradients: model.step(batch), or `with model.accumulate():` with backward in it, "
                f"comes before, and zero_grad() not between.",
            )
        return gradients

    def _show_gradients(self) -> None:
        for part in self.parts:
            part.flag.grad = torch.zeros_like(part.flag)
            for shard in part.shards:
                shard.parameter.grad = shard.gradient

    def _are_shown(self) -> bool:
        """Whether gradients are there to use; without any optimizer too, for nobody could take them away."""
        return not self.parts or any(part.flag.grad is not None for part in self.parts)

    def _drop(self, agreed: Agreed) -> None:
        """Leave out the step: nothing of it is applied, and the next one may begin."""
        advance(self.state, agreed)
        self.result = _result(agreed, agreed.norm, 0.0, overflowed=False)
        self._gradients = None


def _result(agreed: Agreed, norm: float, scale: float, *, overflowed: bool) -> StepResult:
    return StepResult(agreed.loss, int(agreed.count), norm, agreed.is_finite, scale, overflowed)


def _whole(batch: Any, _microbatch: int) -> Any:
    return batch
