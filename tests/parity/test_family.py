"""Every member of the data-parallel family computes what one device does; the full product runs in `make parity`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meshwright.verification.rank import CandidateRank
from tests.parity.family import GLOBAL_BATCH, SUBJECTS, Shape, job
from tests.parity.verifying import Verifier

ALL_SHAPES = [
    Shape(world, zero, copies, ownership)
    for (world, copies), zero, ownership in itertools.product(
        [(2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3)], [1, 2, 3], ["flat", "whole"]
    )
]


def check(ranks: Any, subject: str, optimizer: str, precision: str, shapes: list[Shape]) -> None:
    # 20 samples in 2 micro-steps are 4, 3 and 3 on three ranks: statistics of the batch over unequal counts.
    batch = 20 if subject == "resnet" else GLOBAL_BATCH
    with Verifier(ranks) as verifier:
        prepared = verifier.prepare(
            job(subject, optimizer=optimizer, precision=precision, global_batch=batch)
        )
        for shape in shapes:
            result = verifier.run(prepared, plan=shape.plan(prepared.job))
            assert result.ok, f"{shape}\n{result.table()}"


@pytest.mark.parametrize(
    ("subject", "optimizer", "precision", "shapes"),
    [
        ("net", "sgd", "fp64", [Shape(4, 3, 2), Shape(4, 3, 2, "whole"), Shape(2, 3, 2)]),
        pytest.param(
            "gpt",
            "adamw",
            "fp64",
            [Shape(4, 1, 2, "whole"), Shape(3, 3, 1, "whole")],
            marks=pytest.mark.parity,
        ),
        ("llama", "adamw", "fp32", [Shape(4, 2, 2), Shape(3, 2, 1, "whole")]),
        ("gpt", "muon", "fp64", [Shape(3, 0), Shape(3, 3, 1, "whole"), Shape(4, 1, 2, "whole")]),
        pytest.param("gpt", "muon", "bf16", [Shape(4, 3, 2, "whole")], marks=pytest.mark.parity),
        pytest.param(
            "resnet", "adamw", "fp64", [Shape(3, 3, 1, "whole"), Shape(3, 1, 3)], marks=pytest.mark.parity
        ),
        ("net", "adamw", "fp64", [Shape(3, 0, transport="shm"), Shape(4, 3, 2, "whole", "shm")]),
        ("gpt", "adamw", "fp32", [Shape(2, 1, transport="shm"), Shape(4, 2, 2, transport="shm")]),
        pytest.param("llama", "muon", "bf16", [Shape(3, 3, 1, "whole", "shm")], marks=pytest.mark.parity),
        pytest.param("resnet", "sgd", "fp64", [Shape(3, 3, transport="shm")], marks=pytest.mark.parity),
    ],
    ids=lambda value: None if isinstance(value, list) else value,
)
def test_family_equals_one_device(
    ranks: Any, subject: str, optimizer: str, precision: str, shapes: list[Shape]
) -> None:
    check(ranks, subject, optimizer, precision, shapes)


@pytest.mark.parity
@pytest.mark.parametrize(("optimizer", "precision"), [("adamw", "fp64"), ("sgd", "bf16"), ("muon", "fp32")])
@pytest.mark.parametrize("subject", ["net", "gpt", "resnet"])
def test_whole_family_over_shared_memory(ranks: Any, subject: str, optimizer: str, precision: str) -> None:
    shapes = [Shape(world, 0) for world in (2, 3, 4)] + ALL_SHAPES
    holds_whole = [s for s in shapes if s.ownership == "whole" or s.copies == s.world or s.zero == 0]
    chosen = holds_whole if optimizer == "muon" else shapes
    check(ranks, subject, optimizer, precision, [replace(shape, transport="shm") for shape in chosen])


@pytest.mark.parity
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("subject", list(SUBJECTS))
def test_whole_family_equals_one_device(ranks: Any, subject: str, optimizer: str, precision: str) -> None:
    holds_whole = [s for s in ALL_SHAPES if s.ownership == "whole" or s.copies == s.world]
    check(ranks, subject, optimizer, precision, holds_whole if optimizer == "muon" else ALL_SHAPES)


def no_sum_over_copies(rank: CandidateRank) -> None:
    """Each copy of the model keeps the gradients of its own samples."""
    for memory in rank.engine.memories:
        memory.start_copies_sum = lambda _group: None  # type: ignore[method-assign]


def stale_weights_from_owner_1(rank: CandidateRank) -> None:
    """Owner 1 sends the weights that it had before the step."""
    if rank.engine.owners.index == 1:
        rank.engine.finish_step = _with_old_weights(rank)  # type: ignore[method-assign]


def _with_old_weights(rank: CandidateRank) -> Callable[[], None]:
    plain, old = rank.engine.finish_step, [memory.weight_shard.clone() for memory in rank.engine.memories]

    def finish_step() -> None:
        for memory, values in zip(rank.engine.memories, old, strict=True):
            memory.weight_shard.copy_(values)
        plain()

    return finish_step


@pytest.mark.parametrize(
    ("fault", "shape", "check_name", "words"),
    [
        (no_sum_over_copies, Shape(4, 3, 2), "replicas", "differ"),
        (no_sum_over_copies, Shape(2, 2, 2, "whole"), "counts", "1 issued"),
        (stale_weights_from_owner_1, Shape(3, 1, 1, "whole"), "parameters", ""),
    ],
    ids=["hsdp", "whole copies", "whole"],
)
def test_faults_of_the_family_are_found(
    ranks: Any, fault: Callable[[CandidateRank], None], shape: Shape, check_name: str, words: str
) -> None:
    with Verifier(ranks) as verifier:
        prepared = verifier.prepare(job("gpt", optimizer="sgd", precision="fp64"))
        result = verifier.run(prepared, fault, plan=shape.plan(prepared.job))
    failed = {check.name: check for check in result.checks if not check.ok}
    assert "parameters" in failed
    assert failed[check_name].first_wrong is not None
    assert words in failed[check_name].first_wrong.problem
