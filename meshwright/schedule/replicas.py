"""Which ranks run which stage: from the ranks of each stage to teams of a schedule's pipeline.

Owns E231 and E232, for ranks that no schedule can use. Stages may have different numbers of replicas; what lies between
them is redistributed along the micro-batch by the messages of `lower.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import PlanError
from meshwright.schedule.action import Replicas, Schedule


def replicas_of(schedule: Schedule, stage_ranks: Sequence[Sequence[int]], *, samples: int) -> Replicas:
    """The teams that `stage_ranks` make.

    Args:
        schedule: not lowered.
        stage_ranks: the ranks of each stage, in the order of their parts of a micro-batch; stages that share a rank of
            the pipeline share all. Of a schedule in both directions, those of the first one: the ranks of stage s
            run stage P-1-s of the other.
        samples: of a micro-batch, over all replicas of a stage.

    Raises:
        PlanError: E231 for ranks that do not fit the stages, E232 for a replica without a sample.
    """
    if len(stage_ranks) != schedule.num_stages:
        raise PlanError(
            "E231",
            f"{schedule.name} has {schedule.num_stages} stages, and ranks are given for {len(stage_ranks)}; "
            "give a list of ranks for each stage.",
        )
    teams: dict[int, tuple[int, ...]] = {}
    for stage, place in enumerate(schedule.placement[0]):
        team = tuple(stage_ranks[stage])
        if teams.setdefault(place, team) != team:
            raise PlanError(
                "E231",
                f"stage {stage} is on ranks {list(team)}, but {schedule.name} keeps it with a stage on ranks "
                f"{list(teams[place])}; give both the same ranks.",
            )
    held = sorted(rank for team in teams.values() for rank in team)
    if held != list(range(len(held))) or not all(teams.values()):
        raise PlanError(
            "E231",
            f"stages are on ranks {[list(team) for team in stage_ranks]}; each rank from 0 on belongs to one place of "
            "the pipeline, and each stage has a rank.",
        )
    largest = max(map(len, teams.values()))
    if samples < largest:
        raise PlanError(
            "E232",
            f"a micro-batch of {samples} samples over {largest} replicas of a stage leaves one without a sample; take "
            f"micro-batches of at least {largest}, or fewer replicas.",
        )
    return Replicas(tuple(teams[place] for place in range(len(teams))), samples)
