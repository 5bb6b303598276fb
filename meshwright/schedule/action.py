"""What a schedule is: for each rank the order of its actions.

Owns the values that schedules make, and that lowering, checker, simulator, drawing and executor read, and their text.
A stage is a part of the model; stages are numbered from the input. A rank may hold several stages (chunks). `F` is the
forward of a stage for a micro-batch, `B` its whole backward, or, where a schedule splits it, `I` the gradient of the
input, which the stage before waits for, and `W` that of the weights, which nobody waits for.

Text: a line a rank, a cell an action: `2F0` is the forward of stage 2 for micro-batch 0; `2F1/1` runs it where slot 1
places stage 2. The same cells with commas are CSV, as torch's pipelining reads and writes it.

Where stages have several replicas (`Replicas`), a message between two ranks carries the samples that both hold: their
pair says which, and a micro-batch is redistributed by messages alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Op = Literal[
    "F",
    "B",
    "I",
    "W",
    "send_activation",
    "receive_activation",
    "send_gradient",
    "receive_gradient",
    "gather",
    "release",
    "reduce",
]
COMPUTE: tuple[Op, ...] = ("F", "B", "I", "W")
SENDS: tuple[Op, ...] = ("send_activation", "send_gradient")
RECEIVES: tuple[Op, ...] = ("receive_activation", "receive_gradient")
_CELL = re.compile(r"(\d+)([FBIW])(\d+)(?:/(\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does.

    Attributes:
        op: what.
        stage: whose forward or backward; of a message the stage that computes with it (the receiver's).
        microbatch: for which micro-batch; -1 where an action concerns the stage as a whole.
        peer: of a message the rank at its other end, else -1.
        slot: which placement the micro-batch follows; 0 unless a schedule runs in both directions.
    """

    op: Op
    stage: int
    microbatch: int = -1
    peer: int = -1
    slot: int = 0

    def __str__(self) -> str:
        where = f"{self.stage}{self.op}" + (str(self.microbatch) if self.microbatch >= 0 else "")
        peer = f"@{self.peer}" if self.peer >= 0 else ""
        return where + peer + (f"/{self.slot}" if self.slot else "")


Program = tuple[Action, ...]


@dataclass(frozen=True)
class Replicas:
    """Several ranks in the place of each rank of a pipeline; they run its program, each for its part of the samples.

    Attributes:
        teams: for each rank of the pipeline those that stand in its place; every rank is in one team.
        samples: of a micro-batch; members hold consecutive ones, the first one more where they do not divide.
    """

    teams: tuple[tuple[int, ...], ...]
    samples: int

    def parts(self) -> tuple[range, ...]:
        """The samples of each rank."""
        found: dict[int, range] = {}
        for team in self.teams:
            size, extra = divmod(self.samples, len(team))
            for k, rank in enumerate(team):
                start = k * size + min(k, extra)
                found[rank] = range(start, start + size + (k < extra))
        return tuple(found[rank] for rank in range(len(found)))


@dataclass(frozen=True)
class Schedule:
    """An order of actions for every rank.

    Attributes:
        name: as in `plan.schedule`.
        num_stages: parts of the model.
        num_microbatches: micro-batches of a step.
        placement: for each slot, the rank of the pipeline of each stage.
        programs: the actions of each rank.
        replicas: of a lowered schedule whose pipeline ranks are teams; None: each is one rank.
    """

    name: str
    num_stages: int
    num_microbatches: int
    placement: tuple[tuple[int, ...], ...]
    programs: tuple[Program, ...]
    replicas: Replicas | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks that have a program."""
        return len(self.programs)

    def rank_of(self, action: Action) -> int:
        """The rank of the pipeline where the stage of `action` runs for its micro-batch."""
        return self.placement[action.slot][action.stage]

    def team_at(self, place: int) -> tuple[int, ...]:
        """The ranks that stand in the place of one rank of the pipeline."""
        return (place,) if self.replicas is None else self.replicas.teams[place]

    def group_of(self, action: Action) -> tuple[int, ...]:
        """The ranks of a gather, which hold the stage in one slot, or of a reduction, which hold it in any; sorted."""
        if action.op == "gather":
            return tuple(sorted(self.team_at(self.rank_of(action))))
        places = {ranks[action.stage] for ranks in self.placement}
        return tuple(sorted(rank for place in places for rank in self.team_at(place)))

    @property
    def splits_backward(self) -> bool:
        """Whether backward is `I` and `W` instead of `B`."""
        return any(action.op == "I" for program in self.programs for action in program)


def to_text(schedule: Schedule, *, csv: bool = False) -> str:
    """A line a rank; with `csv`, cells are separated by commas."""
    return "\n".join((", " if csv else " ").join(map(str, program)) for program in schedule.programs)


def read_programs(text: str) -> tuple[Program, ...]:
    """Programs from lines of cells, separated by spaces or commas; empty cells of a CSV are waiting, and dropped.

    Raises:
        ValueError: for a cell that is no action, with its line.
    """
    programs = []
    for number, line in enumerate(text.strip().splitlines(), 1):
        cells = [cell for cell in re.split(r"[,\s]+", line) if cell]
        actions = []
        for cell in cells:
            match = _CELL.fullmatch(cell)
            if match is None:
                raise ValueError(f"line {number}: {cell!r} is no action; write e.g. 0F0, 1B3, 1I3 or 1W3")
            stage, op, microbatch, slot = match.groups()
            actions.append(Action(op, int(stage), int(microbatch), slot=int(slot or 0)))  # type: ignore[arg-type]
        programs.append(tuple(actions))
    return tuple(programs)


def without_extra(programs: list[list[Action]], num_microbatches: int) -> tuple[Program, ...]:
    """Drop micro-batches from `num_microbatches` on.

    A right order stays right without some whole micro-batches: a schedule that is simple to write for full rounds is
    written for the next full round.
    """
    return tuple(tuple(a for a in program if a.microbatch < num_microbatches) for program in programs)
