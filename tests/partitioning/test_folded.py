"""Live cuts of a U-Net, and its fold."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from meshwright.partitioning.chain import Block, Chain, chain_of, shares_of
from meshwright.partitioning.exact import solve_exact
from meshwright.partitioning.folded import fold
from meshwright.partitioning.stage_costs import Group, Problem

TIMES = [12, 9, 6, 3, 6, 9, 12]
OUTPUTS = [16, 8, 4, 4, 8, 16]
# e1 e2 e3 m d3 d2 d1, and the skips e3->d3, e2->d2, e1->d1 of the same tensors
EDGES = [(i, i + 1, float(size)) for i, size in enumerate(OUTPUTS)] + [(2, 4, 4.0), (1, 5, 8.0), (0, 6, 16.0)]


def unet(share: float = 1.0) -> Chain:
    blocks = [Block(t, 0.0) for t in TIMES]
    return chain_of(blocks, [(i, j, size * share) for i, j, size in EDGES])


def plain(chain: Chain, stages: int):
    given = Problem(shares_of(chain, stages), (Group(stages, bandwidth=1.0),), (stages, stages), "maxfb")
    # messages count once here, not once for forward and once for backward
    return solve_exact(dataclasses.replace(given, groups=(Group(stages, bandwidth=2.0),)))


def test_a_tensor_that_skips_is_live_until_its_last_reader():
    assert unet().live_bytes == (0, 16, 24, 28, 32, 32, 32, 0)


@pytest.mark.parametrize(("stages", "share", "value"), [(2, 1, 58), (3, 1, 58), (2, 0.25, 37), (3, 0.25, 29)])
def test_plain_stages(stages, share, value):
    found = plain(unet(share), stages)
    assert found.value == value
    if (stages, share) == (2, 1):
        assert found.choices[1].first == 3


def test_a_fold_deletes_the_skips():
    found = fold(unet(), 2, bandwidth=2.0)
    assert found is not None
    assert found.chunks == ((0, 2), (2, 3), (3, 6), (6, 7))
    assert found.loads == (57, 48)
    assert found.value == 57 < plain(unet(), 2).value
    cheap = fold(unet(0.25), 2, bandwidth=2.0)
    assert cheap is not None
    assert cheap.value == 39 > plain(unet(0.25), 2).value


def brute_fold(chain: Chain, devices: int, bandwidth: float) -> float:
    n, best = len(chain), float("inf")
    for cuts in itertools.combinations(range(1, n), 2 * devices - 1):
        edges = (0, *cuts, n)
        owner = [
            min(chunk, 2 * devices - 1 - chunk)
            for chunk in range(2 * devices)
            for _ in range(edges[chunk], edges[chunk + 1])
        ]
        loads = [0.0] * devices
        for block, device in zip(chain.blocks, owner, strict=True):
            loads[device] += block.forward + block.backward
        for value in chain.carried:
            for border in range(devices - 1):  # between device border and border + 1
                readers = {owner[reader] > border for reader in value.consumers}
                if (not owner[value.producer] > border) in readers:
                    for device in (border, border + 1):
                        loads[device] += 2 * value.bytes / bandwidth
        best = min(best, max(loads))
    return best


def test_folds_are_the_best_of_all():
    rng = random.Random(1)
    for _ in range(40):
        devices = rng.choice([2, 2, 3])
        n = rng.randint(2 * devices, 8)
        blocks = [Block(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(n)]
        pairs = [(i, j, float(rng.randint(1, 9))) for i in range(n) for j in range(i + 1, n)]
        chain = chain_of(blocks, rng.sample(pairs, n))
        found = fold(chain, devices, bandwidth=3.0)
        assert found is not None
        assert found.value == pytest.approx(brute_fold(chain, devices, 3.0))


def test_too_few_blocks_for_a_fold():
    assert fold(unet(), 4) is None
    assert fold(unet(), 1) is None
