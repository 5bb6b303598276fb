"""A plan of stages as plain data, certified: what `solve_exact` or `solve_scalar` found, with bytes, bound and gap.

Owns the answer and the errors of one search over one chain. Must not know where costs come from, nor the search over
micro-batches (`search.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.errors import DoesNotFitError, PlanError
from meshwright.partitioning.exact import MOST_STATES, Found, solve_exact
from meshwright.partitioning.least_memory import least_excess
from meshwright.partitioning.scalar import best_scalar
from meshwright.partitioning.stage_costs import Choice, Objective, Problem, StageCosts

Mode = Literal["exact", "rannc"]


@dataclass(frozen=True)
class Stage:
    """Neighbouring blocks on some devices.

    Attributes:
        first: its first block.
        last: its last block.
        devices: replicas; each gets an equal part of every micro-batch.
        forward_seconds: of one micro-batch, messages included.
        backward_seconds: the same of backward, with forward where it is computed again.
        memory_bytes: of each device.
        group: kind of its devices, 0 where there is one kind.
    """

    first: int
    last: int
    devices: int
    forward_seconds: float
    backward_seconds: float
    memory_bytes: float
    group: int = 0


@dataclass(frozen=True)
class Partition:
    """Stages, and how good they are.

    Attributes:
        stages: in order; all devices are used.
        objective: what was minimised.
        value: of these stages.
        optimum: of the best stages; None where the search was stopped.
        bound: no stages are below this.
        mode: `exact`, or `rannc` for the plan that RaNNC's recurrence gives.
        num_microbatches: of a step.
        num_blocks: of the chain.
        recompute: backward computes forward again.
        notes: warnings.
    """

    stages: tuple[Stage, ...]
    objective: Objective
    value: float
    optimum: float | None
    bound: float
    mode: Mode
    num_microbatches: int
    num_blocks: int
    recompute: bool = False
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """The part of the value that a better plan could save at most; 0: none is better."""
        return max(0.0, (self.value - self.bound) / self.value) if self.value else 0.0

    @property
    def imbalance(self) -> float:
        """(longest - mean) / mean of forward and backward over devices."""
        work = [stage.forward_seconds + stage.backward_seconds for stage in self.stages]
        devices = [stage.devices for stage in self.stages]
        mean = sum(t * q for t, q in zip(work, devices, strict=True)) / sum(devices)
        return max(work) / mean - 1 if mean else 0.0

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each stage, see `placed`."""
        return placed([stage.devices for stage in self.stages])


def partition_chain(problem: Problem, *, mode: Mode = "exact", most_states: int = MOST_STATES) -> Partition:
    """Cut a chain into stages.

    Args:
        problem: the chain, the devices and the rules.
        mode: `exact` for the best plan, `rannc` for what RaNNC's recurrence finds.
        most_states: after so many the search stops, and the gap is above 0.

    Raises:
        DoesNotFitError: E270 where no plan meets the memory; it says by how much.
        PlanError: E271 where no plan has the wanted number of stages and replicas.
    """
    clipped = _clipped(problem)
    found = solve_exact(clipped, most_states=most_states)
    stopped = not found.choices and found.bound < math.inf
    wanted = (mode == "rannc" or stopped) and len(problem.groups) == 1
    faithful = best_scalar(clipped) if wanted else ()
    choices = faithful if mode == "rannc" else found.choices or faithful
    if not choices:
        raise _nothing(problem, clipped)
    value = StageCosts(clipped).value(choices)
    return _answer(clipped, mode, found, choices, value)


def placed(replicas: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Ranks of each stage: with g the greatest common divisor, g copies of the pipeline, each on neighbouring ranks.

    Source: RaNNC's flat allocation; there the order of stages inside a copy is arbitrary.
    """
    copies = math.gcd(*replicas)
    found: list[list[int]] = [[] for _ in replicas]
    rank = 0
    for _ in range(copies):
        for ranks, count in zip(found, replicas, strict=True):
            ranks += range(rank, rank + count // copies)
            rank += count // copies
    return tuple(map(tuple, found))


def _clipped(problem: Problem) -> Problem:
    least, most = problem.stages
    most = min(most, problem.num_blocks, problem.num_devices)
    if least > most:
        raise PlanError(
            "E271",
            f"{least} stages cannot be made of {problem.num_blocks} blocks on {problem.num_devices} devices: each "
            f"stage has at least one block and one device. At most {most} stages are possible.",
        )
    return dataclasses.replace(problem, stages=(least, most))


def _answer(
    problem: Problem, mode: Mode, found: Found, choices: tuple[Choice, ...], value: float
) -> Partition:
    costs, stages = StageCosts(problem), []
    for number, choice in enumerate(choices):
        forward, backward, memory = costs.of_choice(choice, len(choices) - 1 - number)
        stages.append(
            Stage(choice.first, choice.stop - 1, choice.devices, forward, backward, memory, choice.group)
        )
    optimum = found.value if found.choices and found.bound == found.value else None
    notes = []
    if optimum is None:
        notes.append(
            f"W270 the search stopped after {found.num_states:,} states: no plan is below {found.bound:.6g}"
        )
    if mode == "rannc" and optimum is not None and value > optimum * (1 + 1e-9):
        notes.append(
            f"W271 RaNNC's recurrence gives {value:.6g}, the best plan is {optimum:.6g}: {value / optimum - 1:.1%} more"
        )
    return Partition(
        tuple(stages),
        problem.objective,
        value,
        optimum,
        min(found.bound, value),
        mode,
        problem.num_microbatches,
        problem.num_blocks,
        problem.recompute,
        tuple(notes),
    )


def _nothing(problem: Problem, clipped: Problem) -> Exception:
    """Why there is no plan."""
    excess = least_excess(clipped)
    least, most = problem.stages
    if excess == math.inf:
        return PlanError(
            "E271",
            f"no {least} to {most} stages with {problem.replicas} replicas use exactly {problem.num_devices} devices "
            f"in {len(problem.groups)} groups; allow other numbers of stages, or --replicas any",
        )
    limits = " and ".join(f"{group.memory_bytes:,.0f}" for group in problem.groups)
    if excess <= 0:
        return DoesNotFitError(
            "E270",
            f"plans fit into {limits} bytes a device, but RaNNC's recurrence finds none; leave out --compat",
        )
    remedy = "more devices or stages, more micro-batches, or recomputation"
    return DoesNotFitError(
        "E270",
        f"no plan fits into {limits} bytes a device: the best of all lacks {excess:,.0f} bytes on its fullest device. "
        f"Give that much more memory, or {remedy}.",
    )
