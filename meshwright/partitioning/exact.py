"""The best stages of a chain, exactly: states are Pareto fronts, bounds cut the search, and the answer is certified.

Stages are laid from the last block to the first. A state is (blocks left, devices left) with two numbers: the longest
forward and the longest backward so far, or the longest stage and the sum of stages. One number is not enough, a state
that is worse now can be better later; so each state keeps all pairs that no other pair beats in both.
Bounds on what the rest must cost (`completions.py`) drop states that cannot come below a target; the target starts at
the bound of the whole chain and rises until a plan is found, which then is the best of all. Where a search would take
more than `most_states` states, it stops: the last target without a plan is a proven lower bound, and the gap says how
far the plan found otherwise may be from the best.

Order among equal plans: fewer stages, then fewer devices in later stages, then later cuts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.partitioning.completions import Completions
from meshwright.partitioning.stage_costs import Choice, Problem

MOST_STATES = 100_000
# After so many with loose bounds, tighter ones are worth their tables.
_FEW_STATES = 2_000
# Of the bound: the first target is the bound itself, but for rounding.
_TARGETS = (1 + 1e-9, 1.01, 1.03, 1.08, 1.2, 1.5, 2.5, math.inf)
_ROUNDING = 1e-12
# The two numbers of a state.
_Pair = tuple[float, float]
# A stage and the ones after it; None is the end of the chain.
_Tail = Any
# Blocks left, devices taken.
_Place = tuple[int, int]


@dataclass(frozen=True)
class Found:
    """The best plan.

    Attributes:
        choices: stages in order; empty where none fits in memory, or none was found in time.
        value: its objective; infinite without a plan.
        bound: no plan is below this.
        num_states: visited.
    """

    choices: tuple[Choice, ...]
    value: float
    bound: float
    num_states: int


def solve_exact(problem: Problem, *, most_states: int = MOST_STATES) -> Found:
    """The best stages, or the proven bound."""
    quick = _solve(Completions(problem), min(most_states, _FEW_STATES))
    if quick.bound == quick.value:
        return quick
    found = _solve(Completions(problem, layered=True), most_states)
    return dataclasses.replace(found, bound=max(found.bound, quick.bound))


def _solve(tables: Completions, most_states: int) -> Found:
    bound = proven = tables.bound()
    visited = 0
    for factor in _TARGETS if bound < math.inf else ():
        target = bound * factor if bound else math.inf
        tail, value, states = _below(tables, target, most_states - visited)
        visited += states
        if tail is not None:
            return Found(_choices(tail), value, value if visited <= most_states else proven, visited)
        if visited > most_states:
            return Found((), math.inf, proven, visited)
        if target == math.inf:
            break
        proven = target
    return Found((), math.inf, math.inf, visited)


def _below(tables: Completions, target: float, most_states: int) -> tuple[_Tail, float, int]:
    """The best plan at or below `target`: its stages (None: there is none), its value, states visited."""
    problem, limit = tables.problem, target * (1 + _ROUNDING)
    fronts: dict[_Place, list[_Pair]] = {}
    layer: dict[_Place, list[tuple[_Pair, _Tail]]] = {(problem.num_blocks, 0): [((0.0, 0.0), None)]}
    best: tuple[_Tail, float] = (None, math.inf)
    visited = 0
    for num_after in range(problem.stages[1]):
        following: dict[_Place, list[tuple[_Pair, _Tail]]] = {}
        may_be_last = num_after + 1 >= problem.stages[0]
        for (start, used), states in layer.items():
            for pair, tail in states:
                lowest = min(limit, best[1] * (1 - _ROUNDING))
                for choice, found, least in _next(tables, (start, used), pair, (num_after, lowest)):
                    visited += 1
                    place = (choice.first, used + choice.devices)
                    if not choice.first:
                        if may_be_last and least < best[1] * (1 - _ROUNDING):
                            best = ((choice, tail), least)
                    elif _enters(fronts, place, found, lasting=num_after + 1 >= problem.stages[0] - 1):
                        _put(following.setdefault(place, []), found, (choice, tail))
            if visited > most_states:
                return *best, visited
        layer = following
    return *best, visited


def _next(
    tables: Completions, place: _Place, pair: _Pair, at: tuple[int, float]
) -> Iterator[tuple[Choice, _Pair, float]]:
    """(stage, pair with it, bound) of each stage that may stand before block `start` and lead below the limit."""
    (start, used), (num_after, limit) = place, at
    rest = tables.rest(num_after + 1)
    is_last = num_after + 1 == tables.problem.stages[1]
    for devices in tables.problem.replica_counts:
        group = tables.place(used, devices)
        if group is None:
            continue
        stage = tables.stage(devices, group, num_after)
        longest, other = tables.grow(pair, (stage[0][:start, start], stage[1][:start, start]))
        ahead = (rest[0][used + devices, :start], rest[1][used + devices, :start])
        least = tables.value(*tables.grow((longest, other), ahead))
        for first in np.flatnonzero(least <= limit)[::-1].tolist():
            if not (first and is_last):
                found = (float(longest[first]), float(other[first]))
                yield Choice(first, start, devices, group), found, float(least[first])


def _enters(fronts: dict[_Place, list[_Pair]], key: _Place, pair: _Pair, *, lasting: bool) -> bool:
    """Whether no pair with at most as many stages beats this one; `lasting`: it may beat later ones."""
    front = fronts.setdefault(key, [])
    if any(x <= pair[0] and y <= pair[1] for x, y in front):
        return False
    if lasting:
        front[:] = [(x, y) for x, y in front if not (pair[0] <= x and pair[1] <= y)]
        front.append(pair)
    return True


def _put(states: list[tuple[_Pair, _Tail]], pair: _Pair, tail: _Tail) -> None:
    if any(x <= pair[0] and y <= pair[1] for (x, y), _ in states):
        return
    states[:] = [state for state in states if not (pair[0] <= state[0][0] and pair[1] <= state[0][1])]
    states.append((pair, tail))


def _choices(tail: _Tail) -> tuple[Choice, ...]:
    found = []
    while tail is not None:
        choice, tail = tail
        found.append(choice)
    return tuple(found)
