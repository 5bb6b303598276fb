"""The memory ledger of a run: predicted before the engine is made, measured in the second step, printed once.

The second step, because the first one makes what stays: optimizer state, pools of buffers. A run of one step has its
state measured and no activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from meshwright.partitioning.checkpointing import Span
from meshwright.training.activations import Subject
from meshwright.training.ledger import (
    ActivationMeter,
    check_fits,
    measured_state,
    possible_changes,
    predict_ledger,
)
from meshwright.training.optimizer import OptimizerSpec
from meshwright.training.state import TrainState


class RunLedger:
    """One rank's ledger.

    Args:
        subject: what is trained.
        spec: the optimizer.
        schedules: of budgets.
        usable: bytes of the device; None: unknown.

    Attributes:
        ledger: as far as it is known now.

    Raises:
        DoesNotFitError: E301.
    """

    def __init__(
        self, subject: Subject, spec: OptimizerSpec, *, schedules: Mapping[str, Span], usable: int | None
    ) -> None:
        self._offloads = subject.plan.offload == "optimizer"
        self._num_steps = 0
        self.ledger = predict_ledger(subject, spec, schedules=schedules)
        check_fits(self.ledger, usable, lambda: possible_changes(subject, spec))

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

        state.randomness = measured
        try:
            yield
        finally:
            state.randomness = plain
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
