"""The search over micro-batches, RaNNC's loops, its published estimates and placement."""

from __future__ import annotations

import math
import random

import pytest

from meshwright.errors import DoesNotFitError, PlanError
from meshwright.partitioning.chain import Block, Chain, chain_of, shares_of
from meshwright.partitioning.estimate import (
    ALL_REDUCE_BYTES_PER_SECOND,
    all_reduce_seconds,
    message_seconds,
    tick_seconds,
)
from meshwright.partitioning.partition import partition_chain, placed
from meshwright.partitioning.search import search, search_rannc
from meshwright.partitioning.stage_costs import Group, Problem
from tests.partitioning.brute import compositions

# RaNNC's published logs: microseconds of forward, backward, all-reduce; bytes in and out; replicas.
BERT = (
    [35409, 34849, 36715, 36657],
    [110886, 110344, 115215, 112948],
    [233871, 222027, 234537, 235245],
    [196608, 167788544, 67125248, 67191296],
    [167788544, 67108864, 67108864, 4],
    [2, 2, 2, 2],
)
RESNET = (
    [164066, 143170, 113227],
    [455616, 460086, 410329],
    [489086, 372131, 528238],
    [77070336, 1027604480, 1027604480],
    [1027604480, 1027604480, 512000],
    [16, 8, 8],
)


@pytest.mark.parametrize(
    ("log", "count", "ticks", "step"), [(BERT, 8, 1666217, 1901462), (RESNET, 4, 3640905, 4169143)]
)
def test_published_logs(log, count, ticks, step):
    forward, backward, reduces, received, sent, replicas = log
    # each direction in whole microseconds, as the log's own code has it
    messages = [
        sum(int(message_seconds(size, 0, replicas=q, num_microbatches=count) * 1e6) for size in (a, b))
        for a, b, q in zip(received, sent, replicas, strict=True)
    ]
    both = [[t + c for t, c in zip(line, messages, strict=True)] for line in (forward, backward)]
    assert tick_seconds(*both, count) == ticks
    params = [t * 1e-6 * ALL_REDUCE_BYTES_PER_SECOND for t in reduces]
    assert ticks + round(all_reduce_seconds(params) * 1e6) == step


def test_weights_behind_the_published_all_reduces():
    """Optimizer bytes of the log are 8 times the weights' (half precision), or twice (float32)."""
    for log, opt, ratio in (
        (BERT, [20085506048, 19068174336, 20142489600, 20203451424], 8),
        (RESNET, [10503057408, 7991459840, 11343830848], 2),
    ):
        for microseconds, size in zip(log[2], opt, strict=True):
            assert size / (microseconds * 1e-6 * ALL_REDUCE_BYTES_PER_SECOND) == pytest.approx(
                ratio, rel=3e-4
            )
    assert sum([10503057408, 7991459840, 11343830848]) / 8 == pytest.approx(3.7298e9, rel=3e-4)


def test_placement_of_the_published_plans():
    assert placed([2, 2, 2, 2]) == ((0, 4), (1, 5), (2, 6), (3, 7))
    first, second, third = placed([16, 8, 8])
    assert first == tuple(r for copy in range(8) for r in (4 * copy, 4 * copy + 1))
    assert (second, third) == (tuple(range(2, 32, 4)), tuple(range(3, 32, 4)))
    assert placed([1, 2]) == ((0,), (1, 2))


def model(rng: random.Random, num_blocks: int, *, output: float = 0.0):
    """Costs of samples: seconds grow with them from a fixed start, which favours few micro-batches."""
    base = [(rng.randint(1, 9), rng.randint(1, 9), float(rng.randint(1, 9))) for _ in range(num_blocks)]

    def costs_at(samples: int) -> Chain:
        return chain_of(
            [
                Block(1 + f * samples, 1 + b * samples, p, 0.5 * f * samples, output * samples)
                for f, b, p in base
            ]
        )

    return costs_at


def brute_step(costs_at, devices: int, batch: int, memory: float) -> float:
    best = math.inf
    for count in (m for m in range(1, batch + 1) if batch % m == 0):
        for stages in range(1, devices + 1):
            for replicas in compositions(devices, stages):
                best = min(best, best_cuts(costs_at, replicas, (batch // count, count), memory))
    return best


def best_cuts(costs_at, replicas, sizes, memory: float) -> float:
    samples, count = sizes
    if max(replicas) > samples:
        return math.inf
    chains = [costs_at(-(-samples // q)) for q in replicas]
    n, stages, best = len(chains[0]), len(replicas), math.inf
    for lengths in compositions(n, stages):
        first, work, reduce, fits = 0, [], 0.0, True
        for i, length in enumerate(lengths):
            blocks = chains[i].blocks[first : first + length]
            params = sum(block.param_bytes for block in blocks)
            kept = sum(block.activation_bytes for block in blocks) * min(count, stages - i)
            fits = fits and params + kept <= memory
            ends = (first > 0) * blocks_out(chains[i], first) + (i + 1 < stages) * blocks_out(
                chains[i], first + length
            )
            work.append(sum(block.forward + block.backward for block in blocks) + 2 * ends / 2.0)
            reduce = max(reduce, 2 * (replicas[i] - 1) / replicas[i] * params / 2.0)
            first += length
        if fits:
            best = min(best, sum(work) + (count - 1) * max(work) + reduce)
    return best


def blocks_out(chain: Chain, cut: int) -> float:
    return chain.blocks[cut - 1].output_bytes


def test_the_search_is_within_its_certificate_of_the_best_of_all():
    rng, exact = random.Random(2), 0
    for _ in range(25):
        devices, batch = rng.randint(1, 4), rng.choice([1, 4, 6])
        costs_at = model(rng, rng.randint(1, 5), output=rng.choice([0.0, 1.0]))
        memory = rng.choice([math.inf, 60.0])
        best = brute_step(costs_at, devices, batch, memory)
        given = Problem({}, (Group(devices, memory_bytes=memory, bandwidth=2.0),), (1, devices))
        if best == math.inf:
            with pytest.raises((DoesNotFitError, PlanError)):
                search(costs_at, given, batch=batch)
            continue
        found = search(costs_at, given, batch=batch)
        assert found.bound * (1 - 1e-9) <= best <= found.step_seconds * (1 + 1e-9)
        assert found.gap < 0.1
        exact += found.step_seconds <= best * (1 + 1e-9)
    assert exact > 15


def test_rannc_takes_the_fewest_stages_that_fit():
    costs_at = model(random.Random(1), 6)
    roomy = Problem({}, (Group(4, memory_bytes=1e6, bandwidth=100.0),), (1, 4))
    plan, copies = search_rannc(costs_at, roomy, batch=16)
    assert (len(plan.stages), copies) == (1, 1)
    assert plan.mode == "rannc"
    tight = Problem({}, (Group(2, memory_bytes=30.0, bandwidth=100.0),), (1, 2))
    plan, _ = search_rannc(costs_at, tight, batch=16)
    assert len(plan.stages) == 2
    assert plan.recompute
    with pytest.raises(DoesNotFitError, match="E270"):
        search_rannc(costs_at, Problem({}, (Group(2, memory_bytes=3.0),), (1, 2)), batch=16)


def test_what_does_not_fit_says_by_how_much():
    chain = chain_of([Block(1, 1, 10.0), Block(1, 1, 4.0)])
    for devices, lacking in ((1, 8), (2, 4)):
        given = Problem(shares_of(chain, devices), (Group(devices, memory_bytes=6),), (1, devices))
        with pytest.raises(
            DoesNotFitError, match=f"E270 no plan fits into 6 bytes a device: .* lacks {lacking} bytes"
        ):
            partition_chain(given)


def test_stages_that_cannot_be():
    chain = chain_of([Block(1, 1)] * 2)
    with pytest.raises(PlanError, match="E271 3 stages cannot be made of 2 blocks on 4 devices"):
        partition_chain(Problem(shares_of(chain, 4), (Group(4),), (3, 3)))
    with pytest.raises(PlanError, match="E271 no 1 to 1 stages with pow2 replicas use exactly 3 devices"):
        partition_chain(Problem(shares_of(chain, 3), (Group(3),), (1, 1), replicas="pow2"))
    with pytest.raises(
        PlanError, match="E271 3 micro-batches do not divide a batch of 4; choose from 1, 2, 4"
    ):
        search(model(random.Random(0), 2), Problem({}, (Group(1),), (1, 1)), batch=4, num_microbatches=(3,))


def test_a_search_that_stops_says_so():
    rng = random.Random(3)
    blocks = [Block(rng.randint(1, 9), rng.randint(1, 9), output_bytes=3.0) for _ in range(24)]
    given = Problem(shares_of(chain_of(blocks), 12), (Group(12, bandwidth=1.0),), (4, 4))
    found = partition_chain(given, most_states=10)
    assert found.optimum is None
    assert found.gap > 0
    assert found.notes[0].startswith("W270 the search stopped after")
    whole = partition_chain(given)
    assert (whole.gap, whole.notes) == (0, ())
    assert found.bound <= whole.value <= found.value


def test_the_faithful_plan_is_labelled():
    blocks = [Block(9, 5), Block(5, 7), Block(9, 3)]
    given = Problem(shares_of(chain_of(blocks), 4), (Group(4),), (3, 3))
    found = partition_chain(given, mode="rannc")
    assert (found.value, found.optimum, found.mode) == (16, 14, "rannc")
    assert found.gap == 0.125
    assert found.notes == ("W271 RaNNC's recurrence gives 16, the best plan is 14: 14.3% more",)
