"""What a step of a user's own loop is made of: its rules, its batch, its open and its closed state, its backward calls.

Owns one step from its first forward to its last backward. What may follow what between steps is `own_loop.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.adapt.dropout import DropoutKind, StatelessDropout
from meshwright.comm.rng import MicroStep
from meshwright.data.index_law import BatchGeometry
from meshwright.errors import LoopError
from meshwright.sharding.engine import ShardParameter
from meshwright.training.state import TrainState
from meshwright.training.step import Agreed, backward_phase, start_step


@dataclass(frozen=True)
class LoopRules:
    """What a job fixes for the loops over its models.

    Attributes:
        seed: of dropout.
        dropout: `stateless` or `native`, as `train.dropout`.
        clip_norm: limit of each optimizer's gradient norm, or None.
    """

    seed: int = 0
    dropout: DropoutKind = "stateless"
    clip_norm: float | None = None


class StepBatch(Sequence[Any]):
    """This rank's part of one step: a sequence of micro-batches, read when they are asked for.

    Args:
        geometry: how the global batch is cut.
        read: micro-step -> its batch.
        trial: a batch on which to try the loss, the same on every rank; None: the first micro-batch.

    Attributes:
        geometry: the same.
    """

    def __init__(
        self, geometry: BatchGeometry, read: Callable[[int], Any], *, trial: Callable[[], Any] | None = None
    ) -> None:
        self.geometry = geometry
        self._read = read
        self._trial = trial

    def trial(self) -> Any:
        """A batch on which to try the loss."""
        return self._read(0) if self._trial is None else self._trial()

    def __len__(self) -> int:
        return self.geometry.num_microbatches

    def __getitem__(self, index: Any) -> Any:
        """Micro-batch `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"micro-batch {index} of {len(self)}")
        return self._read(index)


@dataclass(frozen=True, eq=False)
class Part:
    """The parameters of one optimizer.

    Attributes:
        names: of the parameters.
        shards: this rank's pieces of them.
        is_all: whether no other trained parameter exists.
        flag: an empty parameter in the optimizer's first group; it has a gradient when the others may have one, also on
            a rank that owns no piece, and zero_grad() takes it away.
    """

    names: frozenset[str]
    shards: tuple[ShardParameter, ...]
    is_all: bool
    flag: nn.Parameter


@dataclass
class StepGradients:
    """Gradients of a closed step, until the next one begins.

    Attributes:
        tally: loss sum and count of this rank.
        limit: of the norm, or None.
        kind: `mean` or `sum`, as its backward calls were; empty for `model.step`.
        agreed: what all ranks know of it, once asked.
        stepped: the parts that have been updated by it.
    """

    tally: Tensor
    limit: float | None
    kind: str = ""
    agreed: Agreed | None = None
    stepped: list[Part] = field(default_factory=list)


class OpenStep:
    """An open `accumulate`: runs its forwards and backwards, and counts them.

    Args:
        state: of the model; its step begins here.
        rules: of the loop.
        num_microbatches: micro-steps to come.
        backwards: backward calls of each.

    Attributes:
        done: backward calls so far.
        watch: the mode that sees them, on in the whole block.
    """

    def __init__(self, state: TrainState, rules: LoopRules, *, num_microbatches: int, backwards: int) -> None:
        self.done = 0
        self._state = state
        self._engine = state.engine
        self._group = state.engine.group
        self._rules = rules
        self._num_microbatches = num_microbatches
        self._backwards = backwards
        self._kind = ""
        self._count: float | None = None
        self._rows = 1
        self._counts_rows = True
        self._dropout: StatelessDropout | None = None
        self.watch = BackwardWatch(self)
        self._tally = start_step(state)
        self._engine.start_microbatch(last=self._expected == 1)

    @property
    def _expected(self) -> int:
        return self._num_microbatches * self._backwards

    @property
    def is_complete(self) -> bool:
        """Whether all backward calls came."""
        return self.done == self._expected

    @contextmanager
    def forward(self, rows: int | None) -> Iterator[None]:
        """Around a forward over `rows` samples of this rank (None: unknown): its dropout by the law."""
        if rows and self._counts_rows and torch.is_grad_enabled():
            self._rows, self._counts_rows = rows, False
        if not rows or self._rules.dropout == "native":
            yield
            return
        size = self._group.size
        first = (self.done // self._backwards * size + self._group.index) * rows
        place = MicroStep(self._rules.seed, self._state.step, first, rows, rows * size)
        if self._dropout is None:
            self._dropout = StatelessDropout(
                must_agree=partial(self._group.log.must_agree, self._group.axis), region=self._engine.region
            )
        with self._dropout.entered(place, carrier=self.watch):
            yield

    def recomputing(self) -> AbstractContextManager[None]:
        """Around a backward: what it runs again of the forwards draws the masks that these had."""
        return self._dropout.entered() if self._dropout else nullcontext()

    def run(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], retain_graph: bool | None
    ) -> None:
        """What `loss.backward()` becomes: of a mean over this rank's samples, unless `run_sum` called.

        Args:
            tensors: losses.
            gradients: by which each is multiplied; None: by one.
            retain_graph: as torch's.
        """
        count, self._count = self._count, None
        self._check("mean" if count is None else "sum")
        if count is not None:
            (total,) = tensors
            tally = torch.tensor([float(total.detach()), count], dtype=torch.float64)
            self._run([(total, torch.full_like(total, 1 / self._state.divisor))], None)
            self._tally += tally
            return
        rows, state = self._rows, self._state
        state.expected_count = float(self._num_microbatches * self._group.size * rows)
        seeds = [
            torch.ones_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(tensors, gradients, strict=True)
        ]
        pairs = list(zip(tensors, seeds, strict=True))
        value = sum(float((tensor.detach() * seed).sum()) for tensor, seed in pairs)
        self._run([(tensor, seed * (rows / state.divisor)) for tensor, seed in pairs], retain_graph)
        ends_microbatch = self.done % self._backwards == 0
        self._tally += torch.tensor([value * rows, rows if ends_microbatch else 0], dtype=torch.float64)
        self._counts_rows |= ends_microbatch

    def run_sum(self, total: Tensor, count: Any) -> None:
        """Backward of a sum over `count` things of this rank."""
        self._count = float(count)
        total.backward()  # through the watch, which is off while it acts: hooks would pay for it

    def finish(self, limit: float | None) -> StepGradients:
        """The gradients of the step, to be clipped at `limit`.

        Raises:
            LoopError: E702 when backward calls are missing.
        """
        if not self.is_complete:
            raise LoopError(
                "E702",
                f"{self._announced} ended on rank {self._group.log.rank} after {self.done} of {self._expected} "
                f"backward calls. Announce as many as come, on every rank alike; a micro-batch that counts nothing "
                f"calls model.backward(0 * total, 0).",
            )
        return StepGradients(self._tally, limit, self._kind)

    @property
    def _announced(self) -> str:
        return f"accumulate({self._num_microbatches}, backwards={self._backwards})"

    def _check(self, kind: str) -> None:
        if self.is_complete:
            raise LoopError(
                "E702",
                f"{self._announced} got a further backward call on rank {self._group.log.rank}: the gradients are on "
                f"their way already. Announce as many as come.",
            )
        if self._kind not in ("", kind):
            raise LoopError(
                "E704",
                "one step mixes loss.backward() (a mean) and model.backward(total, count) (a sum): their gradients "
                "have no common divisor. Use one of them.",
            )
        self._kind = kind

    def _run(self, pairs: Sequence[tuple[Tensor, Tensor]], retain_graph: bool | None) -> None:
        with self.recomputing(), backward_phase(self._engine):
            tensors = [tensor for tensor, _ in pairs if tensor.requires_grad]
            if tensors:
                seeds = [seed for tensor, seed in pairs if tensor.requires_grad]
                torch.autograd.backward(tensors, seeds, retain_graph=retain_graph)
        self.done += 1
        if self.done % self._backwards == 0:
            self._dropout = None
        if not self.is_complete:
            self._engine.start_microbatch(last=self.done == self._expected - 1)


class BackwardWatch(TorchFunctionMode):
    """Sees the backward calls in a user's block; in forwards, hands what they call to dropout's scope.

    Attributes:
        hands_to: that scope, while a forward runs.
    """

    def __init__(self, step: OpenStep) -> None:
        super().__init__()
        self.hands_to: TorchFunctionMode | None = None
        self._step = step

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _BACKWARDS:
            return self._backward(func, *args, **(kwargs or {}))
        if self.hands_to is not None:
            return self.hands_to.__torch_function__(func, types, args, kwargs)
        if func is torch.autograd.grad:
            with self._step.recomputing():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _backward(
        self,
        func: Any,
        tensors: Any,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        *,
        grad_tensors: Any = None,
        inputs: Any = None,
    ) -> None:
        gradient = grad_tensors if gradient is None else gradient
        if inputs is not None:  # a gradient of other leaves: the user's
            with self._step.recomputing():
                func(tensors, gradient, retain_graph, create_graph, inputs=inputs)
            return
        if create_graph:
            raise LoopError(
                "E701",
                "backward(create_graph=True): gradients that go into sharded memory have no graph. Take "
                "torch.autograd.grad(..., create_graph=True) and call backward() on what you make of it.",
            )
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        gradients = [gradient] if gradient is None or isinstance(gradient, Tensor) else list(gradient)
        if len(gradients) == 1 and gradients[0] is None:
            gradients = [None] * len(tensors)
        self._step.run(tensors, gradients, retain_graph)


_BACKWARDS = (Tensor.backward, torch.autograd.backward)
