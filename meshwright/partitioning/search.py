"""The outer search: stages, replicas and micro-batches together, without order or first-found bias; and RaNNC's own.

Owns what is tried. For each number of micro-batches the stages are exact (`partition.py`); replicas of the whole
pipeline need no loop of their own, since they are stages whose replicas have a common divisor (`placed`). Costs come
from a function of samples, so that work that is not linear in samples is priced as it is.
The value is the seconds of a step: 1F1B's sum of stages + (M - 1) x longest, and the all-reduce of gradients after it.
The all-reduce depends on the stages. So the stages are first the best without it, then the best of those whose
all-reduce takes at most nine tenths of the one before, until that cannot pay; every plan between two such limits costs
at least the stages of the one plus the all-reduce of the other, which is the certificate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from meshwright.errors import DoesNotFitError, PlanError
from meshwright.partitioning.chain import Chain
from meshwright.partitioning.completions import Completions
from meshwright.partitioning.estimate import all_reduce_seconds, tick_seconds
from meshwright.partitioning.partition import Partition, partition_chain
from meshwright.partitioning.scalar import solve_scalar
from meshwright.partitioning.stage_costs import Choice, Problem, StageCosts

# Of the last all-reduce: how long the next one may take.
_STEP = 0.9
# How samples of a micro-batch lie over the replicas of a stage.
Split = Literal["any", "even", "equal"]
CostsAt = Callable[[int], Chain]


@dataclass(frozen=True)
class Searched:
    """The best plan of all that were tried.

    Attributes:
        partition: stages, replicas and micro-batches.
        step_seconds: of this plan, gradients included.
        bound: no plan within the search is below this.
        num_tried: numbers of micro-batches.
    """

    partition: Partition
    step_seconds: float
    bound: float
    num_tried: int

    @property
    def gap(self) -> float:
        """The part of the step that a better plan could save at most."""
        return max(0.0, (self.step_seconds - self.bound) / self.step_seconds)


def shares_at(costs_at: CostsAt, samples: int, counts: int) -> Mapping[int, Chain]:
    """What one of q replicas does of a micro-batch of `samples`; q above the samples would leave some idle."""
    made: dict[int, Chain] = {}
    shares = {}
    for replicas in range(1, min(counts, samples) + 1):
        own = -(-samples // replicas)
        if own not in made:
            made[own] = costs_at(own)
        shares[replicas] = made[own]
    return shares


def search(
    costs_at: CostsAt,
    problem: Problem,
    *,
    batch: int,
    num_microbatches: tuple[int, ...] = (),
    split: Split = "any",
    least_samples: int = 1,
) -> Searched:
    """The least seconds of a step.

    Args:
        costs_at: costs of a micro-batch of so many samples on one device.
        problem: devices and rules; its shares and micro-batches are replaced.
        batch: samples of a step.
        num_microbatches: what to try; empty: all divisors of the batch up to four times the devices.
        split: `any`: some replicas of a stage may have a sample less; `even`: replicas divide each micro-batch;
            `equal`: and all stages have as many of them.
        least_samples: of a micro-batch on one device.

    Raises:
        DoesNotFitError: E270 where nothing fits, for the number of micro-batches that lacks least.
        PlanError: E271 as `partition_chain`.
    """
    tried = num_microbatches or tuple(_divisors(batch, 4 * problem.num_devices))
    cached = _cached(costs_at)
    best: Searched | None = None
    bound, failures = math.inf, []
    givens: list[tuple[float, int, Problem]] = []
    for count in tried:
        if batch % count:
            legal = ", ".join(map(str, _divisors(batch, batch)))
            raise PlanError(
                "E271", f"{count} micro-batches do not divide a batch of {batch}; choose from {legal}"
            )
        given = dataclasses.replace(problem, num_microbatches=count, objective="1f1b")
        for shared in _with_shares(given, cached, batch // count, split):
            shares = {q: chain for q, chain in shared.shares.items() if batch // count // q >= least_samples}
            if shares:
                alike = dataclasses.replace(shared, shares=shares)
                givens.append((Completions(alike).bound(), len(givens), alike))
    for least, _, given in sorted(givens):
        if best is not None and least >= best.step_seconds:
            break
        limit = math.inf
        while limit:
            try:
                found = partition_chain(dataclasses.replace(given, most_gradient_seconds=limit))
            except (DoesNotFitError, PlanError) as error:
                failures += [error] if limit == math.inf else []
                break
            gradients = _gradient_seconds(given, found)
            bound = min(bound, found.bound + _STEP * gradients)
            if best is None or found.value + gradients < best.step_seconds:
                best = Searched(found, found.value + gradients, 0.0, len(tried))
            if found.bound >= best.step_seconds:
                break  # with less time for gradients the stages only get longer
            limit = _STEP * gradients
    if best is None:
        raise failures[-1] if failures else _none_is_equal(problem, batch)
    return dataclasses.replace(best, bound=min(bound, best.step_seconds))


def _with_shares(given: Problem, costs_at: CostsAt, samples: int, split: Split) -> Iterator[Problem]:
    """The problem with what replicas do; where all stages have equally many, one problem for each such number."""
    if split != "equal":
        shares = shares_at(costs_at, samples, given.num_devices)
        even = {q: chain for q, chain in shares.items() if split == "any" or samples % q == 0}
        yield dataclasses.replace(given, shares=even)
        return
    least, most = given.stages
    for replicas in _divisors(samples, given.num_devices):
        stages = given.num_devices // replicas
        if stages * replicas == given.num_devices and least <= stages <= most:
            shares = {replicas: costs_at(samples // replicas)}
            yield dataclasses.replace(given, shares=shares, stages=(stages, stages))


def _none_is_equal(problem: Problem, batch: int) -> PlanError:
    least, most = problem.stages
    return PlanError(
        "E271",
        f"{least} to {most} stages with as many replicas each do not use exactly {problem.num_devices} devices with "
        f"equal parts of {batch} samples; let the stages divide the devices, and the replicas the batch",
    )


def search_rannc(
    costs_at: CostsAt, problem: Problem, *, batch: int, nodes: int = 1, most_microbatches: int = 32
) -> tuple[Partition, int]:
    """What RaNNC's loops choose: the fewest nodes and stages that fit, then the best of micro-batches 1, 2, 4 ...

    Returns:
        The partition of one pipeline, and how many such pipelines there are.

    Raises:
        DoesNotFitError: E270 where it finds nothing.
    """
    cached, per_node, before = _cached(costs_at), problem.num_devices // nodes, 0
    for used in tuple(_divisors(nodes, nodes)):
        copies = nodes // used
        group = dataclasses.replace(problem.groups[0], count=per_node * used)
        for stages in range(before + 1, per_node * used + 1):
            tried: list[tuple[float, Problem]] = []
            for count in _doubling(min(batch, most_microbatches)):
                given = dataclasses.replace(
                    problem,
                    shares=shares_at(cached, -(-batch // (copies * count)), group.count),
                    groups=(group,),
                    num_microbatches=count,
                    stages=(stages, stages),
                    objective="maxf+maxb",
                    recompute=count > 1,
                    replicas="pow2",
                )
                choices = solve_scalar(given, stages)
                if choices:
                    tried.append((_estimated(given, choices), given))
            if tried:
                return partition_chain(min(tried, key=lambda item: item[0])[1], mode="rannc"), copies
        before = per_node * used
    raise DoesNotFitError(
        "E270", f"RaNNC's search finds no plan for {problem.num_devices} devices; leave out --compat"
    )


def _estimated(given: Problem, choices: tuple[Choice, ...]) -> float:
    costs = StageCosts(given)
    forward, backward, _ = zip(*(costs.of_choice(choice, 0) for choice in choices), strict=True)
    params = [float(given.shares[choice.devices].params[choice.first, choice.stop]) for choice in choices]
    return tick_seconds(forward, backward, given.num_microbatches) + all_reduce_seconds(params)


def _gradient_seconds(problem: Problem, plan: Partition) -> float:
    """The longest all-reduce of a stage's weights over its replicas."""
    costs = StageCosts(problem)
    return max(float(costs.gradient_seconds(s.devices)[s.first, s.last + 1]) for s in plan.stages)


def _cached(costs_at: CostsAt) -> CostsAt:
    made: dict[int, Chain] = {}

    def cached(samples: int) -> Chain:
        if samples not in made:
            made[samples] = costs_at(samples)
        return made[samples]

    return cached


def _doubling(most: int) -> Iterator[int]:
    return (2**power for power in range(most.bit_length()))


def _divisors(number: int, most: int) -> Iterator[int]:
    return (count for count in range(1, min(number, most) + 1) if number % count == 0)
