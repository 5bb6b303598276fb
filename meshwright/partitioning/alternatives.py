"""Questions that change the problem: tied weights together or copied, and the order of unlike devices.

Owns what is tried; each is answered by the exact search. Copies of a tied weight pay an all-reduce of their gradient
each step, which is added to the value.
"""

from __future__ import annotations

import dataclasses
import itertools

from meshwright.errors import DoesNotFitError, PlanError
from meshwright.partitioning.partition import Partition, partition_chain
from meshwright.partitioning.stage_costs import Problem


def best_ties(problem: Problem) -> tuple[Partition, tuple[int, ...]]:
    """The best way to hold each tied weight, and which ties are kept within one stage.

    Args:
        problem: with at most four ties; each of the 2^ties ways is one exact search.

    Raises:
        DoesNotFitError: E270 where no way fits.
    """
    chain = next(iter(problem.shares.values()))
    slowest = min(group.bandwidth for group in problem.groups)
    best: tuple[float, Partition, tuple[int, ...]] | None = None
    failure: DoesNotFitError | PlanError | None = None
    assert len(chain.ties) <= 4, f"{len(chain.ties)} ties are {2 ** len(chain.ties)} searches"
    for number in range(2 ** len(chain.ties)):
        together = tuple(i for i in range(len(chain.ties)) if number >> i & 1)
        inside = {
            cut for i in together for cut in range(chain.ties[i].users[0] + 1, chain.ties[i].users[-1] + 1)
        }
        given = dataclasses.replace(problem, forbidden=problem.forbidden | inside)
        try:
            found = partition_chain(given)
        except (DoesNotFitError, PlanError) as error:
            failure = failure or error
            continue
        owners = [
            sum(any(s.first <= user <= s.last for user in tie.users) for s in found.stages)
            for tie in chain.ties
        ]
        copies = sum(2 * (n - 1) / n * tie.bytes / slowest for n, tie in zip(owners, chain.ties, strict=True))
        if best is None or found.value + copies < best[0]:
            best = (found.value + copies, found, together)
    if best is None:
        assert failure is not None, "no way was tried"
        raise failure
    return best[1], best[2]


def best_order(problem: Problem) -> tuple[Partition, tuple[int, ...]]:
    """The best order of groups of devices along the pipeline, and that order; all orders are tried.

    Raises:
        DoesNotFitError: E270 where no order fits.
    """
    best: tuple[Partition, tuple[int, ...]] | None = None
    failure: DoesNotFitError | PlanError | None = None
    for order in itertools.permutations(range(len(problem.groups))):
        try:
            found = partition_chain(
                dataclasses.replace(problem, groups=tuple(problem.groups[i] for i in order))
            )
        except (DoesNotFitError, PlanError) as error:
            failure = failure or error
            continue
        if best is None or found.value < best[0].value:
            best = (found, order)
    if best is None:
        assert failure is not None, "no order was tried"
        raise failure
    return best
