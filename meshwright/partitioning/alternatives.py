"""Questions that change the problem: tied weights together or copied, and the order of unlike devices.

Owns what is tried; each is answered by the exact search, over blocks (`partition_chain`) or over a model (whatever
solves a problem and says what its answer is worth). Copies of a tied weight pay an all-reduce of their gradient each
step, which is added to the value.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from meshwright.errors import DoesNotFitError, PlanError
from meshwright.partitioning.chain import Tie
from meshwright.partitioning.partition import Partition, partition_chain
from meshwright.partitioning.stage_costs import Problem

MOST_TIES = 4
T = TypeVar("T")


def best_ties(problem: Problem) -> tuple[Partition, tuple[int, ...]]:
    """The best way to hold each tied weight, and which ties are kept within one stage.

    Args:
        problem: with at most four ties; each of the 2^ties ways is one exact search.

    Raises:
        DoesNotFitError: E270 where no way fits.
    """
    ties = next(iter(problem.shares.values())).ties
    return best_ties_by(problem, ties, partition_chain, lambda found: (found.value, found))


def best_ties_by(
    problem: Problem,
    ties: Sequence[Tie],
    solve: Callable[[Problem], T],
    look: Callable[[T], tuple[float, Partition]],
) -> tuple[T, tuple[int, ...]]:
    """As `best_ties`, of whatever `solve` answers; `look` gives its value and its stages over the blocks of `ties`."""
    slowest = min(group.bandwidth for group in problem.groups)
    assert len(ties) <= MOST_TIES, f"{len(ties)} ties are {2 ** len(ties)} searches"

    def tried() -> Iterable[tuple[Problem, tuple[int, ...]]]:
        for number in range(2 ** len(ties)):
            together = tuple(i for i in range(len(ties)) if number >> i & 1)
            inside = {cut for i in together for cut in range(ties[i].users[0] + 1, ties[i].users[-1] + 1)}
            yield dataclasses.replace(problem, forbidden=problem.forbidden | inside), together

    def value(found: T) -> float:
        seconds, partition = look(found)
        owners = [
            sum(any(s.first <= u <= s.last for u in tie.users) for s in partition.stages) for tie in ties
        ]
        return seconds + sum(2 * (n - 1) / n * t.bytes / slowest for n, t in zip(owners, ties, strict=True))

    return _best(tried(), solve, value)


def best_order(problem: Problem) -> tuple[Partition, tuple[int, ...]]:
    """The best order of groups of devices along the pipeline, and that order; all orders are tried.

    Raises:
        DoesNotFitError: E270 where no order fits.
    """
    return best_order_by(problem, partition_chain, lambda found: found.value)


def best_order_by(
    problem: Problem, solve: Callable[[Problem], T], value: Callable[[T], float]
) -> tuple[T, tuple[int, ...]]:
    """As `best_order`, of whatever `solve` answers and what that is worth."""
    orders = itertools.permutations(range(len(problem.groups)))
    tried = (
        (dataclasses.replace(problem, groups=tuple(problem.groups[i] for i in order)), order)
        for order in orders
    )
    return _best(tried, solve, value)


def _best(
    tried: Iterable[tuple[Problem, tuple[int, ...]]],
    solve: Callable[[Problem], T],
    value: Callable[[T], float],
) -> tuple[T, tuple[int, ...]]:
    """The answer of least value with its label, the first of equal ones."""
    best: tuple[float, T, tuple[int, ...]] | None = None
    failure: DoesNotFitError | PlanError | None = None
    for given, label in tried:
        try:
            found = solve(given)
        except (DoesNotFitError, PlanError) as error:
            failure = failure or error
            continue
        seconds = value(found)
        if best is None or seconds < best[0]:
            best = (seconds, found, label)
    if best is None:
        assert failure is not None, "nothing was tried"
        raise failure
    return best[1], best[2]
