"""One rank's part of a gradient that is scaled, missing or doubled: the rank and the factor are named."""

import pytest

from meshwright.launching.verify import job_of
from meshwright.verification.job import Functions
from meshwright.verification.sources import GradientSamples, Source, find_source, sampled_elements
from tests.parity.verifying import Verifier
from tests.verification.models import Net, Rows, loss_of_labels

PARTS = {0: (1.0, 2.0, -1.0), 1: (0.5, -3.0, 2.0), 2: (2.0, 0.25, 1.0)}


def samples(factors, *, seen_scaled=False):
    """Each rank holds one element of a sum in which parts are `factors` times."""
    expected = [sum(part[i] for part in PARTS.values()) for i in range(3)]
    summed = [sum(factors.get(rank, 1.0) * part[i] for rank, part in PARTS.items()) for i in range(3)]
    made = {}
    for rank, part in PARTS.items():
        scale = factors.get(rank, 1.0) if seen_scaled else 1.0
        seen = {i: scale * value for i, value in enumerate(part)}
        made[rank] = GradientSamples(seen, {rank: summed[rank]}, {rank: expected[rank]})
    return made


@pytest.mark.parametrize("seen_scaled", [False, True])
@pytest.mark.parametrize("factor", [2.0, -1.0, 0.5, 1 / 3])
def test_one_rank_explains_the_error(factor, seen_scaled):
    source = find_source(samples({1: factor}, seen_scaled=seen_scaled))
    assert (source.rank, source.factor) == (1, pytest.approx(factor))


def test_a_missing_part():
    source = find_source(samples({2: 0.0}))
    assert source == Source(2, pytest.approx(0.0))
    assert source.describe() == "Rank 2's part of the sum is missing from it."


def test_what_no_single_rank_explains():
    assert find_source(samples({0: 2.0, 1: 2.0})) is None
    assert find_source(samples({0: 2.0, 1: 2.0, 2: 2.0})) is None
    assert find_source(samples({})) is None
    assert find_source({0: samples({0: 2.0})[0]}) is None
    broken = samples({1: 2.0})
    broken[0] = GradientSamples(broken[0].part, {0: float("nan")}, {0: 1.0})
    assert find_source(broken) is None


def test_sampled_elements_are_spread():
    assert sampled_elements(5) == (0, 1, 2, 3, 4)
    for numel in (33, 64, 1000, 4096, 10**6):
        places = sampled_elements(numel)
        assert len(places) > 20
        assert max(places) < numel
    assert len({place % 64 for place in sampled_elements(4096)}) > 20


class Scaled:
    """Rank 1's part of every gradient times 3, in its loss or in the buckets it sends."""

    def __init__(self, where):
        self.where = where

    def __call__(self, candidate):
        if candidate.rank != 1:
            return
        if self.where == "loss":
            plain = candidate.loss

            def loss(model, batch):
                total, count = plain(model, batch)
                return 3 * total - 2 * total.detach(), count

            candidate.loss = loss
            return
        for memory in candidate.engine.memories:
            start = memory.start_reduction

            def sending(*arguments, memory=memory, start=start):
                memory.zero_unwritten()
                memory.gradients.mul_(3)
                return start(*arguments)

            memory.start_reduction = sending


def test_verify_names_the_rank(ranks):
    functions = Functions(Net, loss_of_labels, Rows())
    with Verifier(ranks) as verifier:
        jobs = [
            job_of(functions, plan=f"zero={zero}", processes=3, options={"steps": 2}) for zero in range(4)
        ]
        prepared = verifier.prepare(jobs[0])
        for job in jobs:
            for where in ("loss", "bucket"):
                first = verifier.run(prepared, Scaled(where), plan=job.plan).first_wrong
                assert (first.check, first.step, first.source_rank) == ("gradients", 1, 1)
                assert first.cause.startswith("Rank 1's part is in the sum 3 times")
