"""Which random numbers a micro-step's dropout gets: the index law told to the generator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from meshwright.adapt.dropout import stateless
from meshwright.comm.rng import MicroStep
from meshwright.data.index_law import BatchGeometry
from meshwright.layout.sequence import SequenceRegion
from meshwright.layout.tensor_layout import CutRegion


def stateless_randomness(
    geometry: BatchGeometry,
    *,
    seed: int,
    must_agree: Callable[[str], None] | None = None,
    region: CutRegion | None = None,
    sequence: SequenceRegion | None = None,
) -> Callable[[int, int], AbstractContextManager[None]]:
    """For `TrainState.randomness`: (step, micro-step) -> dropout masks of this rank's samples.

    Args:
        geometry: how the global batch is cut for this rank.
        seed: of the run.
        must_agree: is told each call in a line that is the same on all ranks, e.g. by the log's `must_agree`; then
            the step's reduction finds ranks that draw for other layers or other shapes of a sample.
        region: see `StatelessDropout`.
        sequence: the same.
    """

    def enter(step: int, microbatch: int) -> AbstractContextManager[None]:
        rows = geometry.rank_range(step, microbatch)
        place = MicroStep(
            seed=seed,
            step=step,
            first_row=rows.start - geometry.start_of(step),
            num_rows=len(rows),
            total_rows=geometry.global_batch // geometry.num_microbatches,
        )
        return stateless(place, must_agree=must_agree, region=region, sequence=sequence)

    return enter
