"""Stage-level dynamic programming as RaNNC does it: one state a (stages, blocks, devices), not always the best.

Owns the faithful algorithm with its habits, so that plans can be compared with published ones: a state keeps only its
best value, so a plan that is worse now and better later is lost; for `maxf+maxb` the stored maxima leave out messages;
a search over devices ends at the first number that nothing fits on. `exact.py` is the right way.
Source: RaNNC (arXiv 2103.16063), `form_stage_dp`. Differences: a stage fits if its memory is at most the device's, not
strictly below; ties are broken by order, not by hash.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.partitioning.stage_costs import Choice, Problem, StageCosts


@dataclass(frozen=True)
class _State:
    value: float
    forward: float
    backward: float
    total: float
    choices: tuple[Choice, ...]


_START = _State(0.0, 0.0, 0.0, 0.0, ())


def solve_scalar(problem: Problem, num_stages: int) -> tuple[Choice, ...]:
    """Stages as RaNNC would choose them; empty where it finds none.

    Args:
        problem: with one group; its range of stages is not read.
        num_stages: exactly so many.
    """
    assert len(problem.groups) == 1, "RaNNC knows one kind of device"
    return _Faithful(problem, num_stages).solve()


class _Faithful:
    def __init__(self, problem: Problem, num_stages: int) -> None:
        self._problem, self._num_stages = problem, num_stages
        self._costs = StageCosts(problem)
        counts = problem.replica_counts
        self._seconds = {q: tuple(t.tolist() for t in self._costs.seconds(q, 0)) for q in counts}
        self._work = {q: tuple(t.tolist() for t in self._costs.work_seconds(q, 0)) for q in counts}
        self._counts = frozenset(counts)

    def solve(self) -> tuple[Choice, ...]:
        """All layers of the table."""
        n, devices, last = self._problem.num_blocks, self._problem.num_devices, self._num_stages
        if last > min(n, devices):
            return ()
        table: dict[tuple[int, int], _State] = {(0, 0): _START}
        for stage in range(1, last + 1):
            memory = {q: self._costs.memory(q, last - stage).tolist() for q in self._counts}
            found: dict[tuple[int, int], _State] = {}
            least = 1
            for stop in (n,) if stage == last else range(stage, n - last + stage + 1):
                any_fits = False
                for used in range(devices, max(least, stage) - 1, -1):
                    state, skipped = self._best(table, memory, (stage, stop, used))
                    if state is not None:
                        found[stop, used] = state
                        any_fits = True
                    elif not skipped:
                        least = used + 1
                        break
                if not any_fits:
                    break
            table = found
        end = table.get((n, devices))
        return () if end is None else end.choices

    def _best(
        self,
        table: dict[tuple[int, int], _State],
        memory: dict[int, list[list[float]]],
        place: tuple[int, int, int],
    ) -> tuple[_State | None, bool]:
        """The state at (stage, blocks, devices), and whether a rule about devices left anything out."""
        stage, stop, used = place
        best: _State | None = None
        skipped = False
        for first in (0,) if stage == 1 else range(stage - 1, stop):
            if first in self._problem.forbidden:
                continue
            for before in (0,) if stage == 1 else range(stage - 1, used):
                replicas = used - before
                if replicas not in self._counts:
                    skipped = True
                    continue
                previous = table.get((first, before))
                if previous is None:
                    continue
                held = memory[replicas][first][stop]
                if held > self._problem.groups[0].memory_bytes or held == math.inf:
                    break  # fewer devices hold no more
                grown = self._grown(previous, Choice(first, stop, replicas))
                if best is None or grown.value < best.value:
                    best = grown
        return best, skipped

    def _grown(self, before: _State, choice: Choice) -> _State:
        at, stop, q = choice.first, choice.stop, choice.devices
        forward, backward = self._seconds[q][0][at][stop], self._seconds[q][1][at][stop]
        total = before.total + forward + backward
        if self._problem.objective == "maxf+maxb":
            value = max(forward, before.forward) + max(backward, before.backward)
            kept = (
                max(self._work[q][0][at][stop], before.forward),
                max(self._work[q][1][at][stop], before.backward),
            )
        else:
            kept = (max(forward + backward, before.forward), 0.0)
            value = kept[0]
            if self._problem.objective == "1f1b":
                value = total + (self._problem.num_microbatches - 1) * kept[0]
        return _State(max(value, before.value), *kept, total, (*before.choices, choice))


def best_scalar(problem: Problem) -> tuple[Choice, ...]:
    """The best over all allowed numbers of stages, by the objective as it really is."""
    costs, value = StageCosts(problem), math.inf
    best: tuple[Choice, ...] = ()
    for num_stages in range(problem.stages[0], problem.stages[1] + 1):
        found = solve_scalar(problem, num_stages)
        if found and costs.value(found) < value:
            best, value = found, costs.value(found)
    return best
