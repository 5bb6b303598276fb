"""All plans of a small chain, one by one: shares no code with the algorithms under test."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from meshwright.partitioning.chain import Block, Chain, Tie, chain_of, shares_of
from meshwright.partitioning.stage_costs import OBJECTIVES, Group, Problem


def live_bytes(chain: Chain, cut: int) -> float:
    return sum(v.bytes for v in chain.carried if v.producer < cut <= max(v.consumers))


def traffic(problem: Problem, chain: Chain, first: int, stop: int) -> tuple[float, float]:
    if problem.routing == "relay":
        return live_bytes(chain, first), live_bytes(chain, stop)
    received = sum(
        v.bytes for v in chain.carried if v.producer < first and any(first <= c < stop for c in v.consumers)
    )
    sent = sum(v.bytes for v in chain.carried if first <= v.producer < stop <= max(v.consumers))
    return received, sent


def stage(
    problem: Problem, first: int, stop: int, devices: int, place: tuple[int, int]
) -> tuple[float, ...] | None:
    """Seconds of forward, of backward, and bytes over the memory; `place`: group, stages after it."""
    whole, kind = problem.shares[1], problem.groups[place[0]]
    received, sent = traffic(problem, whole, first, stop)
    messages = (received + sent) / devices / kind.bandwidth
    blocks = whole.blocks[first:stop]
    forward = sum(b.forward for b in blocks) / devices / kind.speed
    backward = sum(b.backward for b in blocks) / devices / kind.speed + problem.recompute * forward
    params = sum(b.param_bytes for b in blocks)
    params += sum(t.bytes for t in whole.ties if any(first <= user < stop for user in t.users))
    kept = sum(b.activation_bytes for b in blocks) / devices
    flying = problem.num_microbatches
    if problem.objective == "1f1b":
        flying = min(flying, place[1] + 1)
    memory = params * (problem.resident + problem.sharded / devices)
    memory += kept + flying * received / devices if problem.recompute else flying * kept
    return forward + messages, backward + messages, memory - kind.memory_bytes


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


def plans(problem: Problem) -> Iterator[tuple[list[tuple[int, int, int, int]], list[tuple[float, ...]]]]:
    n, owner = problem.num_blocks, [g for g, kind in enumerate(problem.groups) for _ in range(kind.count)]
    for num in range(problem.stages[0], min(problem.stages[1], n, len(owner)) + 1):
        for replicas in compositions(len(owner), num):
            if problem.replicas == "pow2" and any(q & (q - 1) for q in replicas):
                continue
            ends = list(itertools.accumulate(replicas))
            if any(owner[end - q] != owner[end - 1] for end, q in zip(ends, replicas, strict=True)):
                continue
            for cuts in itertools.combinations(range(1, n), num - 1):
                if not problem.forbidden.isdisjoint(cuts):
                    continue
                edges = (0, *cuts, n)
                chosen = [(edges[i], edges[i + 1], replicas[i], owner[ends[i] - 1]) for i in range(num)]
                yield (
                    chosen,
                    [stage(problem, a, b, q, (g, num - 1 - i)) for i, (a, b, q, g) in enumerate(chosen)],
                )


def best(problem: Problem) -> tuple[float, float]:
    """The best objective of plans that fit (infinite: none), and the least excess of memory of any plan."""
    value, excess = math.inf, math.inf
    for _, costs in plans(problem):
        over = max(cost[2] for cost in costs)
        excess = min(excess, over)
        if over > 1e-9:
            continue
        forward, backward = [c[0] for c in costs], [c[1] for c in costs]
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        value = min(
            value,
            {
                "maxf+maxb": max(forward) + max(backward),
                "maxfb": max(both),
                "1f1b": sum(both) + (problem.num_microbatches - 1) * max(both),
            }[problem.objective],
        )
    return value, excess


def random_problem(rng: random.Random, *, most_blocks: int = 7, most_devices: int = 6) -> Problem:
    n, devices = rng.randint(1, most_blocks), rng.randint(1, most_devices)
    blocks = [Block(*(float(rng.randint(1, 9)) for _ in range(5))) for _ in range(n)]
    edges = None
    if n > 2 and rng.random() < 0.4:
        pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
        edges = [(i, j, float(rng.randint(1, 9))) for i, j in rng.sample(pairs, min(len(pairs), n + 1))]
    ties = [Tie(tuple(sorted(rng.sample(range(n), 2))), 5.0)] if n > 1 and rng.random() < 0.3 else []
    chain = chain_of(blocks, edges, ties)
    bandwidth = rng.choice([math.inf, 1.0, 4.0])
    memory = math.inf if rng.random() < 0.4 else rng.uniform(0.8, 4.0) * 10 * n
    groups = [Group(devices, 1.0, memory, bandwidth)]
    if devices > 1 and rng.random() < 0.3:
        first = rng.randint(1, devices - 1)
        groups = [Group(first, 1.0, memory, bandwidth), Group(devices - first, 2.0, memory / 2, bandwidth)]
    least = rng.choice([1, 1, min(2, n, devices)])
    return Problem(
        shares=shares_of(chain, devices),
        groups=tuple(groups),
        stages=(least, rng.choice([least, 4, max(n, least)])),
        objective=rng.choice(OBJECTIVES),
        replicas=rng.choice(["any", "pow2"]),
        num_microbatches=rng.choice([1, 2, 4]),
        recompute=rng.random() < 0.4,
        resident=rng.choice([1.0, 2.0]),
        sharded=rng.choice([0.0, 2.0]),
        routing=rng.choice(["relay", "direct"]),
        forbidden=frozenset(cut for cut in range(1, n) if rng.random() < 0.1),
    )
