"""A tape cut into stages: which calls each makes, and which values travel between neighbours.

One rule for every value: it goes from the stage that makes it from neighbour to neighbour up to the last that uses it,
and its gradient the same way back, each stage adding its own. What needs nothing but the batch is made anew by every
stage that uses it, and does not travel.

Owns E202 and E260. A `Cut` is plain data: the calls with which stages begin, by names that hold for batches of every
shape.
"""

from __future__ import annotations

import bisect
import difflib
import json
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.pipeline.tape import Call, Slot, Tape


@dataclass(frozen=True)
class Cut:
    """Where a model is cut.

    Attributes:
        starts: for every stage but the first, the call of a module with which it begins: `blocks.2`.
    """

    starts: tuple[str, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.starts) + 1

    def to_json(self) -> str:
        """Stable JSON."""
        return json.dumps({"starts": list(self.starts)})

    @classmethod
    def from_json(cls, text: str) -> Cut:
        """The inverse of `to_json`."""
        return cls(tuple(json.loads(text)["starts"]))


@dataclass(frozen=True)
class Stage:
    """What one stage does for one micro-batch.

    Attributes:
        calls: positions in the tape, in order; what it makes anew for itself included.
        receives: numbers of the values from the stage before.
        sends: numbers of the values for the stage behind.
        draws_before: random calls of the stages before it.
        drops: for each of its calls, the values nobody needs behind it.
    """

    calls: tuple[int, ...]
    receives: tuple[int, ...]
    sends: tuple[int, ...]
    draws_before: int
    drops: tuple[tuple[int, ...], ...]


def cut_points(tape: Tape) -> list[int]:
    """Positions at which a stage may begin: calls of modules, unless memory is changed in place across."""
    joined = tape.joined()
    return [
        i
        for i, call in enumerate(tape.calls)
        if i and call.module and not tape.is_free[i] and i not in joined
    ]


def balanced_cut(
    tape: Tape, num_stages: int, *, model: str, num_ranks: Sequence[int] = ()
) -> tuple[Cut, list[float]]:
    """The cut whose costliest stage costs its ranks least, and what each stage costs each of them.

    Of equal ones that with the fewest values that cross. `num_ranks`: of each stage; empty: all have as many.

    Raises:
        PlanError: E202 for more stages than there are parts.
    """
    points = cut_points(tape)
    # Before the first module with something to compute there is nothing for a stage.
    points = [p for p in points if any(tape.calls[i].module and not tape.is_free[i] for i in range(p))]
    if num_stages > len(points) + 1:
        raise too_many_stages(num_stages, len(points) + 1, model)
    costs = [0.0]
    for call in tape.calls:
        costs.append(costs[-1] + call.cost + 1e-6)
    bounds = [0, *points, len(tape.calls)]
    crossing = [_num_crossing(tape, p) for p in bounds]
    shares = num_ranks or (1,) * num_stages
    best: list[dict[int, tuple[float, int, tuple[int, ...]]]] = [{0: (0.0, 0, ())}]
    for stage in range(1, num_stages + 1):
        row: dict[int, tuple[float, int, tuple[int, ...]]] = {}
        last = stage == num_stages
        ends = [len(bounds) - 1] if last else range(stage, len(bounds) - 1)
        for end in ends:
            options = [
                (
                    max(worst, (costs[bounds[end]] - costs[bounds[start]]) / shares[stage - 1]),
                    values + crossing[end],
                    (*chosen, end),
                )
                for start, (worst, values, chosen) in best[-1].items()
                if start < end
            ]
            if options:
                row[end] = min(options)
        best.append(row)
    chosen = best[-1][len(bounds) - 1][2]
    positions = [bounds[i] for i in chosen]
    pairs = zip([0, *positions[:-1]], positions, strict=True)
    stage_costs = [(costs[b] - costs[a]) / share for (a, b), share in zip(pairs, shares, strict=True)]
    return Cut(tuple(tape.calls[p].anchor for p in positions[:-1])), stage_costs


def named_cut(tape: Tape, starts: Sequence[str], *, model: str) -> Cut:
    """A cut at the first calls inside the modules `starts`.

    Raises:
        PlanError: E260 for a name at which no stage can begin.
    """
    points = cut_points(tape)
    joined = tape.joined()
    chosen: list[int] = []
    for name in starts:
        inside = [i for i, call in enumerate(tape.calls) if _is_inside(call, name)]
        if not inside:
            known = [tape.calls[p].anchor for p in points]
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise PlanError(
                "E260",
                f"plan.stages: {model} calls no module {name!r}; a stage may begin at {_few(known)}.{hint}",
            )
        if inside[0] in joined:
            raise PlanError(
                "E260",
                f"plan.stages: no stage can begin at {name!r}: {joined[inside[0]]}, and that stays on one stage.",
            )
        if not inside[0] or (chosen and inside[0] <= chosen[-1]):
            raise PlanError(
                "E260",
                f"plan.stages = {list(starts)}: {name!r} runs before or with the stage before it. Name modules in the "
                f"order in which they run, without the first stage's.",
            )
        chosen.append(inside[0])
    return Cut(tuple(tape.calls[p].anchor for p in chosen))


def make_stages(tape: Tape, cut: Cut) -> list[Stage]:
    """What every stage does for a micro-batch of the tape's shape.

    Raises:
        PlanError: E264 where the forward of this shape has no such call, or may not be cut there.
    """
    anchors = {call.anchor: i for i, call in reversed(list(enumerate(tape.calls))) if call.module}
    joined = tape.joined()
    starts: list[int] = []
    for name in cut.starts:
        at = anchors.get(name)
        if at is None or at in joined or (starts and at <= starts[-1]):
            why = joined.get(at, "it runs in another order") if at is not None else "it does not run"
            raise PlanError(
                "E264",
                f"plan.pp: a stage begins at {name!r}, and in the forward of this micro-batch {why}. Every micro-batch "
                f"must run the same modules in the same order; set plan.stages to others, or plan.pp=1.",
            )
        starts.append(at)
    stage_of = [bisect.bisect_right(starts, i) for i in range(len(tape.calls))]
    return _Routing(tape, stage_of, cut.num_stages).stages()


class _Routing:
    """Follows values from stage to stage."""

    def __init__(self, tape: Tape, stage_of: list[int], num_stages: int) -> None:
        self._tape, self._stage_of, self._num = tape, stage_of, num_stages

    def stages(self) -> list[Stage]:
        tape, last_stage = self._tape, self._num - 1
        calls = [
            [i for i, s in enumerate(self._stage_of) if s == stage and not tape.is_free[i]]
            for stage in range(self._num)
        ]
        wanted = [{n for i in own for n in tape.calls[i].inputs} for own in calls]
        wanted[last_stage].add(tape.total)
        if isinstance(tape.count, Slot):
            wanted[last_stage].add(tape.count.number)
        for stage in range(self._num):
            calls[stage] = sorted({*calls[stage], *self._made_anew(wanted[stage])})
        crossing: list[set[int]] = [set() for _ in range(self._num)]
        for stage, numbers in enumerate(wanted):
            for number in numbers:
                maker = tape.values[number].maker
                if maker < 0 or tape.is_free[maker]:
                    continue
                for between in range(self._stage_of[maker], stage):
                    crossing[between].add(number)
        draws = 0
        found = []
        for stage in range(self._num):
            receives = sorted(crossing[stage - 1]) if stage else []
            sends = sorted(crossing[stage])
            keep = {*sends, *((tape.total,) if stage == last_stage else ())}
            keep |= wanted[last_stage] if stage == last_stage else set()
            found.append(
                Stage(
                    tuple(calls[stage]), tuple(receives), tuple(sends), draws, self._drops(calls[stage], keep)
                )
            )
            draws += sum(tape.calls[i].draws for i in calls[stage])
        return found

    def _made_anew(self, numbers: set[int]) -> set[int]:
        """Calls that need the batch alone, and make `numbers` or what they are made from."""
        tape, left, found = self._tape, list(numbers), set[int]()
        while left:
            maker = tape.values[left.pop()].maker
            if maker >= 0 and tape.is_free[maker] and maker not in found:
                found.add(maker)
                left += tape.calls[maker].inputs
        return found

    def _drops(self, calls: list[int], keep: set[int]) -> tuple[tuple[int, ...], ...]:
        last: dict[int, int] = {}
        for place, i in enumerate(calls):
            for n in (*self._tape.calls[i].inputs, *self._tape.calls[i].outputs):
                last[n] = place
        drops: list[list[int]] = [[] for _ in calls]
        for n, place in last.items():
            if n >= 0 and n not in keep:
                drops[place].append(n)
        return tuple(map(tuple, drops))


def _num_crossing(tape: Tape, position: int) -> int:
    """Values made before `position` and used from there on."""
    found = set()
    for call in tape.calls[position:]:
        for n in call.inputs:
            maker = tape.values[n].maker
            if 0 <= maker < position and not tape.is_free[maker]:
                found.add(n)
    return len(found)


def _is_inside(call: Call, name: str) -> bool:
    return call.anchor == name or call.module == name or call.module.startswith(f"{name}.")


def too_many_stages(num_stages: int, num_parts: int, model: str) -> PlanError:
    """E202."""
    valid = [n for n in range(1, num_parts + 1)]
    shown = f"1..{num_parts}" if len(valid) > 1 else "1"
    return PlanError(
        "E202",
        f"{num_stages} pipeline stages exceed the {num_parts} parts into which {model} can be cut (its blocks and the "
        f"modules around them). Valid: {shown}. Set plan.pp or plan.chunks lower, or name modules in plan.stages.",
    )


def uneven_warning(costs: Sequence[float], model: str, *, num_ranks: Sequence[int] = ()) -> str | None:
    """W202 where the costliest stage takes its ranks longer than an even share; arguments as of `balanced_cut`."""
    ranks = num_ranks or (1,) * len(costs)
    mean = math.fsum(map(operator.mul, costs, ranks)) / sum(ranks)
    excess = max(costs) / mean - 1 if mean else 0.0
    if excess <= 0.02:
        return None
    shares = " ".join(f"{cost / mean:.2f}" for cost in costs)
    return (
        f"W202 {model} does not divide evenly over {len(costs)} pipeline stages: they cost {shares} of an even share, "
        f"so a step is up to {100 * excess:.0f} % slower than with even ones"
    )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
