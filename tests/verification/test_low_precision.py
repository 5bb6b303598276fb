"""verify in 16 bits: silent on what is right, loud on faults that are far larger than rounding, and on bf16 sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.launching.verify import job_of
from meshwright.testing.ranks import RankPool
from meshwright.verification.job import Functions
from meshwright.verification.rank import CandidateRank
from meshwright.verification.result import VerifyResult
from tests.parity.verifying import Prepared, Verifier
from tests.verification import faults
from tests.verification.models import Net, Rows, loss_of_labels

POLICIES = ("zero=0", "zero=1", "zero=2", "zero=3")


class Images:
    """A convolution and batch statistics, whose parameters stay float32."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(2, 6, 6, generator=generator),
            "label": torch.tensor(-100 if index % 7 == 2 else index % 3),
        }


def convolutional() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 8), nn.Linear(8, 3)
    )


@pytest.fixture(scope="module")
def verifier(ranks: RankPool) -> Iterator[Verifier]:
    with Verifier(ranks) as made:
        yield made


def prepare(verifier: Verifier, precision: str, *, plan: str = "", **options: Any) -> Prepared:
    functions = Functions(Net, loss_of_labels, Rows(400))
    if options.pop("images", False):
        functions = Functions(convolutional, loss_of_labels, Images())
    processes = options.pop("processes", 2)
    options = {"steps": 2, "precision": precision} | options
    text = ",".join(filter(None, ["bucket_bytes=4096 bytes", plan]))
    return verifier.prepare(job_of(functions, plan=text, processes=processes, options=options))


def run(
    verifier: Verifier, prepared: Prepared, plan: str, inject: Callable[[Any], None] | None = None
) -> VerifyResult:
    config, of = prepared.job.config, prepared.job.plan
    other = job_of(
        Functions(Net, loss_of_labels, Rows(400)),
        plan=f"{plan},micro_batch={of.micro_batch},bucket_bytes=4096 bytes",
        processes=of.mesh.dp,
        options={"precision": config.plan.precision, "global_batch": of.global_batch},
    ).plan
    return verifier.run(prepared, inject, plan=other)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_policy_is_one_device(verifier: Verifier, precision: str) -> None:
    prepared = prepare(verifier, precision, processes=3)
    for plan in (*POLICIES, "zero=1,offload=optimizer", "zero=3,offload=optimizer"):
        result = run(verifier, prepared, plan)
        assert result.ok, result.table()
        assert result.check("gradients").worst_relative > 0, "it does round"
        assert result.check("counts").compared > 0


def test_batch_statistics_in_bf16(verifier: Verifier) -> None:
    prepared = prepare(verifier, "bf16", images=True, processes=3)
    result = verifier.run(prepared)
    assert result.ok, result.table()
    assert result.check("buffers").compared == 6


def sums_in_bf16(rank: CandidateRank) -> None:
    """Gradients of micro-steps are added up with 8 bits: beyond 256 of them nothing is added any more."""
    for memory in rank.engine.memories:
        take = memory.take_gradient

        def taken(position: int, memory: Any = memory, take: Any = take) -> bool:
            complete = take(position)
            view = memory.gradient_views[position]
            view.copy_(view.to(torch.bfloat16))
            return bool(complete)

        memory.take_gradient = taken  # type: ignore[method-assign]


def stale_weights(rank: CandidateRank) -> None:
    """Updated masters never reach the weights."""
    for memory in rank.engine.memories:
        memory.publish = lambda: None  # type: ignore[method-assign]


FAULTS = {
    "twice on one rank": (faults.twice_on_rank_1, "zero=1", "gradients"),
    "all twice": (faults.all_twice, "zero=3", "gradients"),
    "no reduction": (faults.no_reduction, "zero=0", "gradients"),
    "stale weights": (stale_weights, "zero=2", "activations"),
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_faults_are_seen(verifier: Verifier, precision: str) -> None:
    prepared = prepare(verifier, precision)
    for name, (inject, plan, check) in FAULTS.items():
        result = run(verifier, prepared, plan, inject)
        assert not result.ok, name
        assert result.first_wrong is not None
        assert result.first_wrong.check == check, f"{name}: {result.table()}"


@pytest.mark.parametrize("plan", ["zero=0", pytest.param("zero=1", marks=pytest.mark.parity)])
def test_sums_of_gradients_in_bf16_are_seen(verifier: Verifier, plan: str) -> None:
    """64 micro-steps: the sum is rounded to 8 bits as often."""
    prepared = prepare(verifier, "bf16", plan="micro_batch=1", global_batch=128, steps=1)
    right = run(verifier, prepared, plan)
    assert right.ok, right.table()
    assert "2 x one-device reordering noise" in right.table()
    wrong = run(verifier, prepared, plan, sums_in_bf16)
    assert not wrong.check("gradients").ok, wrong.table()
    assert wrong.first_wrong is not None
    assert wrong.first_wrong.check == "gradients"
