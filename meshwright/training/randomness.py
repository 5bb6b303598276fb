"""Which random numbers a micro-step's dropout gets: the index law told to the generator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass

from meshwright.adapt.dropout import StatelessDropout
from meshwright.comm.rng import MicroStep
from meshwright.data.index_law import BatchGeometry
from meshwright.layout.sequence import SequenceRegion
from meshwright.layout.tensor_layout import CutRegion


@dataclass(frozen=True)
class StatelessDraws:
    """Dropout masks of this rank's samples, for whole micro-steps and for parts of a model.

    Attributes:
        geometry: how the global batch is cut for this rank.
        seed: of the run.
        must_agree: is told each call in a line that is the same on all ranks, e.g. by the log's `must_agree`; then
            the step's reduction finds ranks that draw for other layers or other shapes of a sample.
        region: see `StatelessDropout`.
        sequence: the same.
    """

    geometry: BatchGeometry
    _: KW_ONLY
    seed: int
    must_agree: Callable[[str], None] | None = None
    region: CutRegion | None = None
    sequence: SequenceRegion | None = None

    def around(self, step: int, microbatch: int) -> AbstractContextManager[None]:
        """For `TrainState.randomness`: entered once around forward and backward."""
        return self._dropout(0).entered(self._place(step, microbatch))

    def part(
        self, step: int, microbatch: int, calls_before: int
    ) -> Callable[[bool], AbstractContextManager[None]]:
        """Of a part of a model: entered with True around its forward, with False around parts of its backward.

        Args:
            step: number of the step.
            microbatch: of the step.
            calls_before: random calls of the parts before it.
        """
        dropout, place = self._dropout(calls_before), self._place(step, microbatch)
        return lambda is_forward: dropout.entered(place if is_forward else None)

    def _dropout(self, calls_before: int) -> StatelessDropout:
        return StatelessDropout(
            must_agree=self.must_agree,
            region=self.region,
            sequence=self.sequence,
            calls_before=calls_before,
        )

    def _place(self, step: int, microbatch: int) -> MicroStep:
        rows = self.geometry.rank_range(step, microbatch)
        return MicroStep(
            seed=self.seed,
            step=step,
            first_row=rows.start - self.geometry.start_of(step),
            num_rows=len(rows),
            total_rows=self.geometry.global_batch // self.geometry.num_microbatches,
        )
