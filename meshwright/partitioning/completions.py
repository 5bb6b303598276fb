"""What the stages that are still to come must cost at least: two tables, each exact for one number alone.

Owns the stage tables of a search and these bounds. A plan is two numbers (see `exact.py`); the least of each alone,
over all ways to lay the first `start` blocks on the first devices, is a shortest path, found for all states at once.
Together they bound every plan from below, memory and whole devices included.
"""

from __future__ import annotations

import math

import numpy as np

from meshwright.partitioning.chain import Table
from meshwright.partitioning.stage_costs import Problem, StageCosts

# Above so many elementary steps the tables do not know how many stages follow: faster, and looser.
_MOST_STEPS = 150_000_000


class Completions:
    """Tables of one problem."""

    def __init__(self, problem: Problem, *, layered: bool = False) -> None:
        """`layered`: the tables know how many stages follow; tighter, and as often as many stages longer to make."""
        self.problem = problem
        self._costs = StageCosts(problem)
        self._sums = problem.objective == "1f1b"
        finite = any(group.memory_bytes < math.inf for group in problem.groups)
        self._memory_by_place = self._sums and finite
        self._stages: dict[tuple[int, int, int], tuple[Table, Table]] = {}
        n, devices, most = problem.num_blocks, problem.num_devices, problem.stages[1]
        limited = problem.stages[0] > 1 or most < min(n, devices)
        steps = most * devices * len(problem.replica_counts) * (n + 1) ** 2
        self.is_layered = layered and (limited or self._memory_by_place) and steps < _MOST_STEPS
        self._tables = self._layered() if self.is_layered else [self._alike()]

    def stage(self, replicas: int, group: int, num_after: int) -> tuple[Table, Table]:
        """Both numbers of a stage of blocks first <= i < stop; infinite where it is not allowed."""
        key = (replicas, group, num_after if self._memory_by_place else 0)
        if key not in self._stages:
            forward, backward = self._costs.seconds(replicas, group)
            both = forward + backward
            first, second = {
                "maxf+maxb": (forward, backward),
                "maxfb": (both, np.zeros_like(both)),
                "1f1b": (both, both),
            }[self.problem.objective]
            capacity = self.problem.groups[group].memory_bytes
            memory = self._costs.memory(replicas, key[2])
            refused = (memory > capacity) | np.isinf(memory)
            refused |= np.arange(len(refused))[:, None] >= np.arange(len(refused))[None, :]
            refused[sorted(self.problem.forbidden)] = True
            self._stages[key] = (np.where(refused, math.inf, first), np.where(refused, math.inf, second))
        return self._stages[key]

    def rest(self, num_after: int) -> tuple[Table, Table]:
        """`(devices+1, n+1)` each: at least this for the first `start` blocks when `used` devices are taken."""
        return self._tables[num_after if self.is_layered else 0]

    def value(self, longest: Table, other: Table) -> Table:
        """The objective of pairs of numbers."""
        if self._sums:
            more = self.problem.num_microbatches - 1  # 0 times infinity is no number
            return other + more * longest if more else other
        return longest + other

    def grow(
        self, pair: tuple[float | Table, float | Table], stage: tuple[Table, Table]
    ) -> tuple[Table, Table]:
        """The pair after one more stage, or after all that come; one pair or many."""
        second = pair[1] + stage[1] if self._sums else np.maximum(pair[1], stage[1])
        return np.maximum(pair[0], stage[0]), second

    def bound(self) -> float:
        """No plan is below this; infinite where there is none."""
        longest, other = self.rest(0)
        return float(self.value(longest[0, -1], other[0, -1]))

    def place(self, used: int, replicas: int) -> int | None:
        """The group of the next stage's devices, or None where they are not of one."""
        left = self.problem.num_devices - used
        if replicas > left:
            return None
        group = self.problem.group_of[left - 1]
        return group if self.problem.group_of[left - replicas] == group else None

    def _ends(self, *, allowed: bool) -> tuple[Table, Table]:
        """Nothing is left: allowed on all devices only."""
        shape = (self.problem.num_devices + 1, self.problem.num_blocks + 1)
        found = np.full(shape, math.inf), np.full(shape, math.inf)
        if allowed:
            found[0][-1, 0] = found[1][-1, 0] = 0.0
        return found

    def _layered(self) -> list[tuple[Table, Table]]:
        least, most = self.problem.stages
        tables = [self._ends(allowed=True)]
        for num_after in reversed(range(most)):
            following = tables[-1]
            found = self._ends(allowed=num_after >= least)
            for replicas in self.problem.replica_counts:
                for used in range(self.problem.num_devices - replicas + 1):
                    self._lower(found, following, (used, replicas, num_after))
            tables.append(found)
        return tables[::-1]

    def _alike(self) -> tuple[Table, Table]:
        """Without the number of stages: memory as if none followed."""
        found = self._ends(allowed=True)
        for used in reversed(range(self.problem.num_devices)):
            for replicas in self.problem.replica_counts:
                self._lower(found, found, (used, replicas, 0))
        return found

    def _lower(
        self, found: tuple[Table, Table], following: tuple[Table, Table], at: tuple[int, int, int]
    ) -> None:
        """Try one number of replicas for the next stage of all states with `used` devices taken."""
        used, replicas, num_after = at
        group = self.place(used, replicas)
        if group is None or following[0][used + replicas].min() == math.inf:
            return
        stage = self.stage(replicas, group, num_after)
        longest = np.maximum(stage[0], following[0][used + replicas][:, None]).min(axis=0)
        rest = following[1][used + replicas][:, None]
        other = (stage[1] + rest if self._sums else np.maximum(stage[1], rest)).min(axis=0)
        np.minimum(found[0][used], longest, out=found[0][used])
        np.minimum(found[1][used], other, out=found[1][used])
