"""Stages on unlike numbers of ranks: still one device, whatever is tied, skipped, sharded or dropped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor

from meshwright.comm.ops import DataGroups
from meshwright.launching.verify import job_of
from meshwright.pipeline.micro_batch import MicroBatch
from meshwright.pipeline.redistribute import Parts
from meshwright.verification.job import Functions, Handover, VerifyJob
from meshwright.verification.rank import CandidateRank
from meshwright.verification.resumed import resume_check
from tests.parity.verifying import Verifier
from tests.pipeline.test_pipelines import SUBJECTS, check


@pytest.fixture(scope="module")
def verifier(ranks) -> Iterator[Verifier]:
    with Verifier(ranks) as made:
        yield made


PLANS = [
    ("gpt", "stage_ranks=[[0],[1,2,3]],zero=1", 18),
    ("gpt", "stage_ranks=[[0],[1,2,3]],zero=0", 18),
    ("gpt", "stage_ranks=[[0,3],[1],[2]],zero=3", 12),
    ("gpt", "stage_ranks=[[0,1,3],[2]],zero=2,recompute=full", 18),
    ("gpt", "stage_ranks=[[0],[1,2,3]],zero=0,schedule=dualpipe", 24),
    ("llama", "stage_ranks=[[0],[1,2,3]],zero=2,schedule=zb-h1", 18),
    ("llama", "stage_ranks=[[0,1,2],[3]],zero=3,schedule=zb-v", 18),
    ("gpt", "stage_ranks=[[0],[1,2,3]],zero=1,schedule=interleaved,transport=shm", 18),
    ("u-net", "stage_ranks=[[0,1,2],[3]],zero=0", 18),
    ("u-net", "stage_ranks=[[0],[1,2],[3]],zero=3,schedule=gpipe", 12),
    ("encoder-decoder", "stage_ranks=[[0],[1,2,3]],zero=1", 18),
    ("gpt2", "stage_ranks=[[0],[1,2,3]],zero=1", 18),
    ("mlp", "stage_ranks=[[0],[1,2,3]],zero=0,sync=ring", 18),
]


@pytest.mark.parametrize(
    ("subject", "plan", "batch"),
    [PLANS[0], *(pytest.param(*plan, marks=pytest.mark.parity) for plan in PLANS[1:])],
)
def test_places_of_unlike_numbers_of_ranks_are_one_device(verifier, subject, plan, batch):
    """A tied embedding on both ends, dropout, unequal tokens; three micro-batches, of 6 samples on 1 and 3 ranks."""
    check(verifier, subject, f"{plan},micro_batch=2,bucket_bytes=4096 bytes", 4, global_batch=batch)


@pytest.mark.parity
def test_samples_that_ranks_of_a_place_do_not_divide(verifier):
    """Five places' worth of ranks: 3 samples on 2 ranks are 2 and 1, on 3 they are one each."""
    plan = "stage_ranks=[[0,1],[2,3,4]],zero=1,micro_batch=1"
    check(verifier, "gpt", plan, 5, global_batch=9)
    check(verifier, "gpt", plan.replace("zero=1", "zero=3"), 5, global_batch=9)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("stage_ranks=[[0],[1,2,3]],zero=1", "zero=3,dp=2"),
        ("stage_ranks=[[0],[1,2,3]],zero=3", "stage_ranks=[[0,1],[2],[3]],zero=0"),
        ("stage_ranks=[[0,1,2],[3]],zero=0", "pp=2,dp=1,schedule=zb-h1"),
        ("zero=2,dp=3", "stage_ranks=[[0,1,2],[3]],zero=2"),
        ("pp=4,dp=1", "stage_ranks=[[0],[1,2,3]],zero=1"),
    ],
)
def test_checkpoints_come_from_and_go_to_other_layouts(verifier, tmp_path, saved, loaded):
    """After the first of two steps, optimizer state included; micro-batches of 6 samples, cut anew."""
    before, after = job_for("gpt", saved, 18), job_for("gpt", loaded, 18)
    prepared, handover = verifier.prepare(before), Handover(tmp_path / "ckpt", 1)
    verifier.measure(prepared, save=handover)
    reports = verifier.measure(prepared, plan=after.plan, load=handover)
    found = resume_check(before, after, prepared.reference, reports, after=1)
    assert found.ok, found.first_wrong
    assert found.compared > 100


def job_for(subject: str, plan: str, batch: int) -> VerifyJob:
    """Of micro-batches of 6 samples over all ranks."""
    build, loss, data = SUBJECTS[subject]
    sizes = {"stage_ranks=[[0],[1,2,3]]": (4, 3), "stage_ranks=[[0,1],[2],[3]]": (4, 2)}
    sizes |= {"stage_ranks=[[0,1,2],[3]]": (4, 3), "pp=2,dp=1": (2, 1), "pp=4,dp=1": (4, 1)}
    sizes |= {f"zero={zero},dp={dp}": (dp, dp) for zero in (2, 3) for dp in (2, 3)}
    processes, dp = next(size for key, size in sizes.items() if plan.startswith(key))
    options = {"steps": 2, "global_batch": batch}
    plan = f"{plan},micro_batch={6 // dp},bucket_bytes=4096 bytes"
    return job_of(Functions(build, loss, data), plan=plan, processes=processes, options=options)


def _everyone_speaks(_candidate: CandidateRank) -> None:
    """What a place knows enters the sum over places once a rank."""
    DataGroups.speaks = property(lambda _groups: True)  # type: ignore[assignment, method-assign]


def _rows_of_the_first(_candidate: CandidateRank) -> None:
    """All ranks of the larger place are sent the first rows."""
    plain = Parts.shared_with

    def shared(parts: Parts, peer: int) -> tuple[int, int] | None:
        found = plain(parts, peer)
        return None if found is None else (0, found[1])

    Parts.shared_with = shared  # type: ignore[method-assign]


def _rows_turned_round(_candidate: CandidateRank) -> None:
    """What comes of a value is put together from the last rank on."""
    plain = MicroBatch.joined

    def turned(batch: MicroBatch, number: int, pieces: list[Tensor]) -> Tensor:
        return plain(batch, number, pieces[::-1])

    MicroBatch.joined = turned  # type: ignore[method-assign]


@pytest.mark.parity
@pytest.mark.parametrize(
    ("inject", "checks"),
    [
        (_everyone_speaks, {"gradients", "grad_norm"}),
        (_rows_of_the_first, {"activations"}),
        (_rows_turned_round, {"gradients"}),
    ],
)
def test_what_goes_wrong_between_unlike_places_is_found(verifier, inject, checks):
    prepared = verifier.prepare(job_for("gpt", "stage_ranks=[[0],[1,2,3]],zero=1", 18))
    result = verifier.run(prepared, inject, timeout=100)
    wrong = {check.name for check in result.checks if not check.ok}
    assert checks <= wrong
