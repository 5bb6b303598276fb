"""The best stages of a chain, exactly: states are Pareto fronts, bounds cut the search, and the answer is certified.

Stages are laid from the last block to the first. A state is (blocks left, devices left) with two numbers: the longest
forward and the longest backward so far, or the longest stage and the sum of stages. One number is not enough, a state
that is worse now can be better later; so each state keeps all pairs that no other pair beats in both.
A bound on what the rest must cost at least (its work, spread evenly over the devices that are left) drops states that
cannot come below a target; the target starts at the bound of the whole chain and rises until a plan is found, which
then is the best of all. Where a search would take more than `most_states` states, it stops: the last target without a
plan is a proven lower bound, and the gap says how far the plan found otherwise may be from the best.

Order among equal plans: fewer stages, then fewer devices in later stages, then later cuts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.partitioning.stage_costs import Choice, Problem, StageCosts

MOST_STATES = 400_000
# Of the bound: the first target is the bound itself, but for rounding.
_TARGETS = (1 + 1e-9, 1.01, 1.03, 1.08, 1.2, 1.5, 2.5, math.inf)
_ROUNDING = 1e-12
# The two numbers of a state.
_Pair = tuple[float, float]
# A stage and the ones after it; None is the end of the chain.
_Tail = Any


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
    search = _Search(problem)
    bound = proven = search.bound()
    visited = 0
    for factor in _TARGETS:
        target = bound * factor if bound else math.inf
        tail, value, states = search.below(target, most_states - visited)
        visited += states
        if tail is not None:
            finished = visited <= most_states
            return Found(_choices(tail), value, value if finished else proven, visited)
        if visited > most_states or target == math.inf:
            break
        proven = target
    return Found((), math.inf, proven if visited > most_states else math.inf, visited)


class _Search:
    """Tables of one problem, and one search below a target."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._costs = StageCosts(problem)
        self._combine, self._least = _rules(problem)
        speeds = [problem.groups[group].speed for group in problem.group_of]
        # power of the first k devices
        self._power = np.concatenate(([0.0], np.cumsum(speeds))).tolist()
        self._work = self._work_before()
        self._tables: dict[tuple[int, int], tuple[list[list[float]], list[list[float]], list[list[float]]]] = {}
        self._memories: dict[tuple[int, int], list[list[float]]] = {}

    def bound(self) -> float:
        """What no plan can be below: all work on all devices, and the longest block with the most replicas."""
        problem, power = self._problem, self._power[-1]
        forward, backward = (line[-1] / power for line in self._work[:2])
        longest = [0.0, 0.0, 0.0]
        blocks = np.arange(problem.num_blocks)
        pairs = [(q, g) for q in problem.replica_counts for g in range(len(problem.groups))]
        alone = [self._costs.work_seconds(q, g) for q, g in pairs if q <= problem.groups[g].count]
        for which, both in enumerate(([f for f, _ in alone], [b for _, b in alone], [f + b for f, b in alone])):
            longest[which] = float(np.min([table[blocks, blocks + 1] for table in both], axis=0).max())
        if problem.objective == "maxf+maxb":
            return max(forward, longest[0]) + max(backward, longest[1])
        together = max(forward + backward, longest[2])
        if problem.objective == "maxfb":
            return together
        return forward + backward + (problem.num_microbatches - 1) * together

    def below(self, target: float, most_states: int) -> tuple[_Tail, float, int]:
        """The best plan at or below `target`: its stages (None: there is none), its value, states visited."""
        problem = self._problem
        limit = target * (1 + _ROUNDING)
        fronts: dict[tuple[int, int], list[_Pair]] = {}
        layer: dict[tuple[int, int], list[tuple[_Pair, _Tail]]] = {(problem.num_blocks, 0): [((0.0, 0.0), None)]}
        best: tuple[_Tail, float] = (None, math.inf)
        visited = 0
        for num_after in range(problem.stages[1]):
            following: dict[tuple[int, int], list[tuple[_Pair, _Tail]]] = {}
            for (start, used), states in layer.items():
                for pair, tail in states:
                    for first, devices, group, found, least in self._next((start, used), pair, num_after, limit):
                        if least > limit or least >= best[1] * (1 - _ROUNDING):
                            continue
                        visited += 1
                        grown = (Choice(first, start, devices, group), tail)
                        if not first:
                            best = (grown, least)
                        elif _enters(fronts, (first, used + devices), found, num_after + 1 >= problem.stages[0] - 1):
                            _put(following.setdefault((first, used + devices), []), found, grown)
                if visited > most_states:
                    return *best, visited
            layer = following
        return *best, visited

    def _next(
        self, state: tuple[int, int], pair: _Pair, num_after: int, limit: float
    ) -> Iterator[tuple[int, int, int, _Pair, float]]:
        """(first block, devices, group, pair, bound) of each stage that may stand before block `start`."""
        problem, (start, used) = self._problem, state
        left = problem.num_devices - used
        least_more = max(0, problem.stages[0] - num_after - 1)
        for devices in problem.replica_counts:
            rest = left - devices
            if rest < least_more:
                break
            group = problem.group_of[left - 1]
            if problem.group_of[rest] != group:
                break
            forward, backward, work = self._table(devices, group)
            memory, capacity = self._memory(devices, num_after), problem.groups[group].memory_bytes
            power = self._power[rest]
            for first in self._firsts(start, (rest, num_after, least_more), pair, limit):
                own = work[first][start]
                if self._least(pair, (own, own), (0.0, 0.0)) > limit:
                    break
                if memory[first][start] > capacity:
                    if problem.recompute:  # then memory need not grow with the stage
                        continue
                    break
                if first in problem.forbidden:
                    continue
                found = self._combine(pair, forward[first][start], backward[first][start])
                ahead = (self._work[0][first] / power, self._work[1][first] / power) if rest else (0.0, 0.0)
                yield first, devices, group, found, self._least(found, None, ahead)

    def _firsts(self, start: int, place: tuple[int, int, int], pair: _Pair, limit: float) -> range:
        """First blocks worth trying, descending: enough stays for the stages that must come, not too much for the rest."""
        rest, num_after, least_more = place
        problem = self._problem
        if rest == 0:
            return range(0, -1, -1) if least_more == 0 else range(0)
        if num_after + 1 == problem.stages[1]:
            return range(0)  # devices would be left over
        highest = start - 1
        if limit < math.inf:
            budget = limit * self._power[rest]
            if problem.objective == "1f1b":
                budget = (limit - pair[1]) * self._power[rest] / problem.num_microbatches
            highest = min(highest, bisect_right(self._work[2], budget * (1 + _ROUNDING)) - 1)
        return range(highest, max(least_more, 1) - 1, -1)

    def _work_before(self) -> tuple[list[float], list[float], list[float]]:
        """Device-seconds of forward, backward and both of the first k blocks, at the cheapest number of replicas."""
        problem = self._problem
        lines = []
        for which in range(2):
            alone = []
            for q in problem.replica_counts:
                chain = problem.shares[q]
                forward = np.array([block.forward for block in chain.blocks])
                backward = np.array([block.backward for block in chain.blocks])
                alone.append(q * (backward + forward * problem.recompute if which else forward))
            lines.append(np.concatenate(([0.0], np.cumsum(np.min(alone, axis=0)))))
        return lines[0].tolist(), lines[1].tolist(), (lines[0] + lines[1]).tolist()

    def _table(self, devices: int, group: int) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
        """Forward, backward, and what grows with the stage: its work without messages."""
        if (devices, group) not in self._tables:
            forward, backward = self._costs.seconds(devices, group)
            alone = sum(self._costs.work_seconds(devices, group))
            self._tables[devices, group] = (forward.tolist(), backward.tolist(), alone.tolist())
        return self._tables[devices, group]

    def _memory(self, devices: int, num_after: int) -> list[list[float]]:
        same = num_after if self._problem.objective == "1f1b" else 0
        if (devices, same) not in self._memories:
            self._memories[devices, same] = self._costs.memory(devices, same).tolist()
        return self._memories[devices, same]


_Combine = Callable[[_Pair, float, float], _Pair]
_Least = Callable[[_Pair, _Pair | None, _Pair], float]


def _rules(problem: Problem) -> tuple[_Combine, _Least]:
    """How a stage changes a pair, and what a plan with this pair costs at least.

    The second takes (pair, (own, own) of a stage that is not in the pair yet, seconds of what is ahead); `own` is
    forward and backward of the stage together.
    """
    more = problem.num_microbatches - 1
    if problem.objective == "maxf+maxb":

        def worst_both(pair: _Pair, forward: float, backward: float) -> _Pair:
            return max(pair[0], forward), max(pair[1], backward)

        def least_both(pair: _Pair, own: _Pair | None, ahead: _Pair) -> float:
            least = max(pair[0], ahead[0]) + max(pair[1], ahead[1])
            return least if own is None else max(least, own[0])

        return worst_both, least_both
    if problem.objective == "maxfb":

        def worst(pair: _Pair, forward: float, backward: float) -> _Pair:
            return max(pair[0], forward + backward), 0.0

        def least_worst(pair: _Pair, own: _Pair | None, ahead: _Pair) -> float:
            return max(pair[0], ahead[0] + ahead[1], own[0] if own is not None else 0.0)

        return worst, least_worst

    def longest_and_sum(pair: _Pair, forward: float, backward: float) -> _Pair:
        both = forward + backward
        return max(pair[0], both), pair[1] + both

    def least_step(pair: _Pair, own: _Pair | None, ahead: _Pair) -> float:
        rest, stage = ahead[0] + ahead[1], own[0] if own is not None else 0.0
        return pair[1] + stage + rest + more * max(pair[0], rest, stage)

    return longest_and_sum, least_step


def _enters(fronts: dict[tuple[int, int], list[_Pair]], key: tuple[int, int], pair: _Pair, lasting: bool) -> bool:
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
