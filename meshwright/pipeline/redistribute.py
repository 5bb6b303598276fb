"""Values between places of a pipeline with unlike numbers of ranks: a rank sends another the samples that both have.

Owns which dim of a value its samples lie along: the one that grows with a batch of one more, found without values, and
E236. Must not know messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.ops import PipelineGroups
from meshwright.errors import PlanError
from meshwright.nested import map_tensors, tensors_in
from meshwright.pipeline.cut import Stage
from meshwright.pipeline.tape import Tape
from meshwright.schedule.action import Replicas
from meshwright.schedule.lower import overlap


@dataclass(frozen=True)
class Parts:
    """The samples of a micro-batch that each rank of a pipeline has.

    Attributes:
        groups: the ranks.
        ranges: of each.
    """

    groups: PipelineGroups
    ranges: tuple[range, ...]

    @classmethod
    def of(cls, groups: PipelineGroups, num_samples: int) -> Parts:
        """Of a micro-batch of that many, over all ranks of a place."""
        return cls(groups, Replicas(groups.teams, num_samples).parts())

    def shared_with(self, peer: int) -> tuple[int, int] | None:
        """(first, number) of this rank's samples that `peer` has too; None: all of them, as its place is as large."""
        groups = self.groups
        if len(groups.team_at(groups.place)) == len(groups.team_at(groups.place_of(peer))):
            return None
        mine = self.ranges[groups.index]
        both = overlap(mine, self.ranges[peer])
        return both.start - mine.start, len(both)

    def peers_at(self, place: int) -> list[int]:
        """The ranks of a place that have samples of this rank's, in their order."""
        mine = self.ranges[self.groups.index]
        return [peer for peer in self.groups.team_at(place) if overlap(mine, self.ranges[peer])]


def num_samples_in(batch: Any) -> int:
    """Samples of a collated batch: its tensors are stacked along their first dim."""
    return int(next(iter(tensors_in(batch))).shape[0])


def with_one_more(batch: Any) -> Any:
    """`batch` with its first sample once more."""
    return map_tensors(batch, lambda x: torch.cat([x, x[:1]]))


def crossing(
    stages: Sequence[Stage], placements: Sequence[Sequence[int]], groups: PipelineGroups
) -> set[int]:
    """Numbers of the values that travel between places with unlike numbers of ranks."""
    found: set[int] = set()
    for placement in placements:
        for number, stage in enumerate(stages[1:], 1):
            sizes = {len(groups.team_at(placement[n])) for n in (number - 1, number)}
            found |= set(stage.receives) if len(sizes) > 1 else set()
    return found


def sample_dims(tape: Tape, taller: Tape, wanted: set[int], num_samples: int) -> dict[int, int]:
    """Value to the dim along which its samples lie.

    Args:
        tape: of a batch.
        taller: of one with one sample more.
        wanted: numbers of values.
        num_samples: in the batch of `tape`.

    Raises:
        PlanError: E236 for a value of which samples have no dim of their own.
    """
    alike = [call.anchor for call in tape.calls] == [call.anchor for call in taller.calls]
    found = {}
    for number in sorted(wanted):
        shape = tape.values[number].shape
        other = taller.values[number].shape if alike and number < len(taller.values) else ()
        grown = [d for d, sizes in enumerate(zip(shape, other, strict=False)) if sizes[0] != sizes[1]]
        if len(shape) != len(other) or len(grown) != 1 or shape[grown[0]] != num_samples:
            raise _indivisible(tape, number, num_samples)
        if other[grown[0]] != num_samples + 1:
            raise _indivisible(tape, number, num_samples)
        found[number] = grown[0]
    return found


def narrowed(x: Tensor, dim: int, part: tuple[int, int] | None) -> Tensor:
    """The samples `part` (first, number) of a value, contiguous; all for None."""
    return (x if part is None else x.narrow(dim, *part)).contiguous()


def _indivisible(tape: Tape, number: int, num_samples: int) -> PlanError:
    value = tape.values[number]
    maker = tape.calls[value.maker].describe()
    return PlanError(
        "E236",
        f"plan.stage_ranks: the result of {maker}, of shape {value.shape} for {num_samples} samples, travels between "
        f"places with unlike numbers of ranks, and no dim of it has just the samples: each rank would not know its "
        f"rows. Begin the stage elsewhere (plan.stages), or give both places as many ranks.",
    )
