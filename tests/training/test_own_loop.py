"""Loops of a user's own: on ranks and any policy they compute what plain PyTorch does on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sharding.harness import POLICIES
from tests.training.own_programs import PROGRAMS, PlainLab, ShardedLab

CLIP = 0.7
Outcome = dict[str, tuple[list[float], list[tuple[str, int, Tensor]]]]


def _run(mesh: Any, policy: str, names: list[str]) -> Outcome:
    return {name: PROGRAMS[name](ShardedLab(mesh, policy, CLIP)) for name in names}


@pytest.fixture(scope="module")
def expected() -> Outcome:
    return {name: program(PlainLab(CLIP)) for name, program in PROGRAMS.items()}


def _check(expected: Outcome, ranks: list[Outcome]) -> None:
    for outcome in ranks:
        for name, (numbers, pieces) in outcome.items():
            plain_numbers, plain_pieces = expected[name]
            assert numbers == pytest.approx(plain_numbers, rel=1e-12), name
            whole = {parameter: values for parameter, _, values in plain_pieces}
            for parameter, start, values in pieces:
                wanted = whole[parameter][start : start + len(values)]
                torch.testing.assert_close(values, wanted, rtol=1e-11, atol=1e-13, msg=f"{name}: {parameter}")


CASES = [(policy, world) for policy in POLICIES for world in (1, 2, 3)]


@pytest.mark.parametrize(("policy", "world"), CASES)
def test_programs_compute_what_plain_pytorch_does(ranks, expected: Outcome, policy: str, world: int) -> None:
    _check(expected, ranks.run(_run, world, policy, list(PROGRAMS)))
