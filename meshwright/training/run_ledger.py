"""The memory ledger of a run: predicted before the engine is made, measured in the second step, printed once.

The second step, because the first one makes what stays: optimizer state, pools of buffers. A run of one step has its
state measured and no activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from meshwright.partitioning.checkpointing import Span
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.activations import Subject
from meshwright.training.ledger import (
    ActivationMeter,
    Ledger,
    check_fits,
    measured_state,
    possible_changes,
    predict_ledger,
)
from meshwright.training.optimizer import OptimizerSpec
from meshwright.training.stage_ledger import predict_places
from meshwright.training.stages import Pipeline
from meshwright.training.state import Stages, TrainState


class RunLedger:
    """One rank's ledger.

    Args:
        subject: what is trained.
        spec: the optimizer.
        schedules: of budgets.
        usable: bytes of the device; None: unknown.
        pipeline: of which this is the first rank; any of its places may be the one that does not fit.

    Attributes:
        ledger: as far as it is known now.

    Raises:
        DoesNotFitError: E301.
    """

    def __init__(
        self,
        subject: Subject,
        spec: OptimizerSpec,
        *,
        schedules: Mapping[str, Span],
        usable: int | None,
        pipeline: Pipeline | None = None,
    ) -> None:
        self._offloads = subject.plan.offload == "optimizer"
        self._num_steps = 0
        if pipeline is None:
            self.ledger = predict_ledger(subject, spec, schedules=schedules)
            check_fits(self.ledger, usable, lambda: possible_changes(subject, spec))
            return
        places = predict_places(subject, spec, pipeline, schedules=schedules)
        self.ledger = places[0]

        def largest(other: Subject) -> Ledger:
            return max(predict_places(other, spec, pipeline), key=lambda ledger: ledger.predicted_peak)

        worst = max(places, key=lambda ledger: ledger.predicted_peak)
        check_fits(worst, usable, lambda: possible_changes(subject, spec, largest))

    def meet(self, state: TrainState) -> None:
        """The engine has been made."""
        if state.engine.gathers_in_place:
            self.ledger = self.ledger.without_gathered()

    @contextmanager
    def step(self, state: TrainState) -> Iterator[None]:
        """Around each training step."""
        self._num_steps += 1
        if self._num_steps != 2:
            yield
            return
        meter, plain = ActivationMeter(state.engine.model), state.randomness

        def measured(step: int, microbatch: int) -> AbstractContextManager[None]:
            inner = plain(step, microbatch)
            return inner if microbatch else meter.around(inner)

        stages, state.randomness = state.stages, measured
        if stages is not None:
            state.stages = _Metered(stages, meter)
        try:
            yield
        finally:
            state.randomness, state.stages = plain, stages
        self._measure(state, meter.held or {})

    def line_after_step(self, state: TrainState, *, last: bool) -> str | None:
        """The ledger in words, after the step that completed it."""
        if self._num_steps == 1 and last:
            self._measure(state, {})
            return self.ledger.line()
        return self.ledger.line() if self._num_steps == 2 else None

    def _measure(self, state: TrainState, activations: Mapping[str, int]) -> None:
        held = measured_state(state.engine, state.optimizer, offload=self._offloads)
        self.ledger = replace(self.ledger, measured={**held, **activations})


@dataclass(frozen=True)
class _Metered:
    """Stages whose step is measured: micro-batches wait for their backwards, so all of them count."""

    stages: Stages
    meter: ActivationMeter

    def run(
        self, engine: ShardingEngine, micro_batch: Callable[[int], Any], *, divisor: float, step: int
    ) -> Tensor:
        """See `Stages`."""
        with self.meter.around(nullcontext()):
            return self.stages.run(engine, micro_batch, divisor=divisor, step=step)
