"""Ranks must have built the same model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.training.task import check_same_model


def _build(seed: int = 0, last: float = 0.0, buffer: float = 1.0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].bias.data[-1] = last
    model[1].running_var.fill_(buffer)
    return model


_CHANGES = {"a seed": {"seed": 1}, "one element": {"last": 1e-38}, "a buffer": {"buffer": 2.0}}


def _check(mesh, change: str | None, odd_rank: int) -> str | None:
    model = _build(**_CHANGES[change]) if change and mesh.rank == odd_rank else _build()
    try:
        check_same_model(model, mesh.group("dp"))
    except PlanError as error:
        return f"{error.code} {error.message}"
    return None


def test_the_same_model_passes(ranks) -> None:
    assert ranks.run(_check, 3, None, 0) == [None] * 3


@pytest.mark.parametrize("odd_rank", [0, 2])
@pytest.mark.parametrize("change", list(_CHANGES))
def test_a_different_model_on_one_rank_is_an_error_on_all(ranks, change: str, odd_rank: int) -> None:
    for rank, text in enumerate(ranks.run(_check, 3, change, odd_rank)):
        assert text is not None
        assert text.startswith("E113 ranks of dp built different models")
        assert f"rank {rank}: digest 0x" in text


def _check_meta(mesh, width_of_rank: list[int]) -> str | None:
    with torch.device("meta"):
        model = nn.Linear(width_of_rank[mesh.rank], 4)
    try:
        check_same_model(model, mesh.group("dp"))
    except PlanError as error:
        return error.code
    return None


def test_of_meta_parameters_the_shapes_must_agree(ranks) -> None:
    assert ranks.run(_check_meta, 2, [3, 3]) == [None, None]
    assert ranks.run(_check_meta, 2, [3, 5]) == ["E113", "E113"]
