"""What a stage costs on given devices: seconds of forward and backward with messages, and bytes of memory.

Owns the rules of a search (`Problem`) and the formulas; the algorithms (`scalar.py`, `exact.py`) only compare. With q
replicas each works on its own share of a micro-batch:

    forward(stage)  = sum of blocks / speed + (received + sent) / bandwidth
    backward(stage) = the same of backward, plus forward where it is computed again
    memory(stage)   = weights x (resident + sharded / q) + activations x micro-batches in flight

Where forward is computed again, only the stage's input is kept in flight, and one micro-batch's activations.
In flight are all micro-batches (forwards, then backwards), or with 1F1B as many as there are stages from here on.
Source: the rules of RaNNC (arXiv 2103.16063). Simplifications: messages do not overlap with work; both directions
take as long; memory of messages is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from meshwright.partitioning.chain import Chain, Routing, Table

Objective = Literal["maxf+maxb", "maxfb", "1f1b"]
OBJECTIVES: tuple[Objective, ...] = ("maxf+maxb", "maxfb", "1f1b")
Replicas = Literal["any", "pow2"]


@dataclass(frozen=True)
class Group:
    """Devices of one kind, neighbours in the pipeline.

    Attributes:
        count: devices.
        speed: of each; costs of blocks are for speed 1.
        memory_bytes: of each.
        bandwidth: bytes per second of a message to or from each.
        message_seconds: of a message, however small.
    """

    count: int
    speed: float = 1.0
    memory_bytes: float = math.inf
    bandwidth: float = math.inf
    message_seconds: float = 0.0


@dataclass(frozen=True)
class Problem:
    """A chain to cut.

    Attributes:
        shares: for each allowed number of replicas, what one of them does of a micro-batch.
        groups: devices in the order of the pipeline; all are used, and a stage never spans two groups.
        stages: least and most.
        objective: `maxf+maxb` (longest forward plus longest backward), `maxfb` (longest forward and backward of one
            stage), `1f1b` (sum of stages + (micro-batches - 1) x longest: a step).
        replicas: which numbers of devices a stage may have.
        num_microbatches: of a step.
        recompute: backward computes forward again.
        resident: bytes of state a byte of weights that every replica holds.
        sharded: bytes of state that are cut over a stage's replicas.
        routing: of tensors that skip stages.
        forbidden: cuts that are not allowed.
        update_seconds: of the optimizer, for a byte of weights; where state is cut, each replica has its part.
        moved: how often q replicas move (q - 1) / q of their weights, or of gradients: in each forward, in each
            backward, and after a step.
        gradient_bandwidth: bytes per second of an all-reduce; None: the slowest of the groups.
        most_gradient_seconds: a stage whose all-reduce of gradients and update take longer is not allowed.
    """

    shares: Mapping[int, Chain] = field(hash=False)
    groups: tuple[Group, ...]
    stages: tuple[int, int]
    objective: Objective = "maxf+maxb"
    replicas: Replicas = "any"
    num_microbatches: int = 1
    recompute: bool = False
    resident: float = 1.0
    sharded: float = 0.0
    routing: Routing = "relay"
    forbidden: frozenset[int] = frozenset()
    update_seconds: float = 0.0
    moved: tuple[float, float, float] = (0.0, 0.0, 2.0)
    gradient_bandwidth: float | None = None
    most_gradient_seconds: float = math.inf

    @property
    def num_blocks(self) -> int:
        """Blocks of the chain."""
        return len(next(iter(self.shares.values())))

    @property
    def num_devices(self) -> int:
        """Devices of all groups."""
        return sum(group.count for group in self.groups)

    @cached_property
    def replica_counts(self) -> tuple[int, ...]:
        """Allowed numbers of replicas of a stage, ascending."""
        counts = sorted(count for count in self.shares if count <= self.num_devices)
        return tuple(c for c in counts if self.replicas == "any" or c & (c - 1) == 0)

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """The group of each device."""
        return tuple(number for number, group in enumerate(self.groups) for _ in range(group.count))


@dataclass(frozen=True)
class Choice:
    """One stage of a plan.

    Attributes:
        first: its first block.
        stop: the block after its last.
        devices: replicas.
        group: kind of the devices.
    """

    first: int
    stop: int
    devices: int
    group: int = 0


class StageCosts:
    """Tables of a problem, one a (replicas, group)."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._traffic = {q: problem.shares[q].traffic(problem.routing) for q in problem.replica_counts}
        self._made: dict[tuple[int, int], tuple[Table, Table]] = {}

    def seconds(self, replicas: int, group: int) -> tuple[Table, Table]:
        """Forward and backward of blocks first <= i < stop, messages included; `(n+1, n+1)` each."""
        key = (replicas, group)
        if key not in self._made:
            chain, kind = self.problem.shares[replicas], self.problem.groups[group]
            received, sent = self._traffic[replicas]
            first, stop = np.indices(received.shape)
            ends = (first > 0) + (stop < len(chain))
            messages = (received + sent) / kind.bandwidth + kind.message_seconds * ends
            forward = chain.forward / kind.speed
            backward = chain.backward / kind.speed + (forward if self.problem.recompute else 0.0)
            move = (replicas - 1) / replicas / self._gradient_bandwidth * chain.params
            times = self.problem.moved
            self._made[key] = (
                forward + messages + times[0] * move,
                backward + messages + times[1] * move,
            )
        return self._made[key]

    @property
    def _gradient_bandwidth(self) -> float:
        return self.problem.gradient_bandwidth or min(group.bandwidth for group in self.problem.groups)

    def work_seconds(self, replicas: int, group: int) -> tuple[Table, Table]:
        """The same without messages."""
        chain, speed = self.problem.shares[replicas], self.problem.groups[group].speed
        forward = chain.forward / speed
        return forward, chain.backward / speed + (forward if self.problem.recompute else 0.0)

    def gradient_seconds(self, replicas: int) -> Table:
        """Of a stage's all-reduce on a ring, at the slowest bandwidth of all groups, and of its update."""
        update = self.problem.update_seconds / (replicas if self.problem.sharded else 1)
        for_a_byte = self.problem.moved[2] * (replicas - 1) / replicas / self._gradient_bandwidth + update
        return for_a_byte * self.problem.shares[replicas].params

    def memory(self, replicas: int, num_after: int) -> Table:
        """Bytes of a device of a stage that `num_after` stages follow; infinite where its gradients take too long."""
        if self.problem.most_gradient_seconds < math.inf:
            too_long = self.gradient_seconds(replicas) > self.problem.most_gradient_seconds
            return np.where(too_long, math.inf, self._memory(replicas, num_after))
        return self._memory(replicas, num_after)

    def _memory(self, replicas: int, num_after: int) -> Table:
        problem, chain = self.problem, self.problem.shares[replicas]
        states = chain.params * (problem.resident + problem.sharded / replicas)
        in_flight = problem.num_microbatches
        if problem.objective == "1f1b":
            in_flight = min(in_flight, num_after + 1)
        if problem.recompute:
            received, _ = self._traffic[replicas]
            return states + in_flight * received + chain.activations
        return states + in_flight * chain.activations

    def of_choice(self, choice: Choice, num_after: int) -> tuple[float, float, float]:
        """Seconds of forward and of backward, and bytes."""
        at = (choice.first, choice.stop)
        forward, backward = self.seconds(choice.devices, choice.group)
        return float(forward[at]), float(backward[at]), float(self.memory(choice.devices, num_after)[at])

    def value(self, choices: tuple[Choice, ...]) -> float:
        """The objective of a plan, from its stages."""
        costs = [self.of_choice(choice, 0)[:2] for choice in choices]
        return value_of(self.problem, [f for f, _ in costs], [b for _, b in costs])


def value_of(problem: Problem, forward: list[float], backward: list[float]) -> float:
    """The objective, from seconds of stages."""
    if problem.objective == "maxf+maxb":
        return max(forward) + max(backward)
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    if problem.objective == "maxfb":
        return max(both)
    return sum(both) + (problem.num_microbatches - 1) * max(both)
