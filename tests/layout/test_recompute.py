"""The words of plan.recompute."""

from __future__ import annotations

import pytest

from meshwright.errors import PlanError
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.layout.plan import TrainPlan
from meshwright.layout.recompute import NOTHING_AGAIN, Recomputation, parse_recompute


def test_words() -> None:
    assert parse_recompute("none") == NOTHING_AGAIN
    assert parse_recompute("every:3").rules == (("", Recomputation("every", 3)),)
    assert parse_recompute("budget:1.5 GiB").rules[0][1] == Recomputation("budget", 3 << 29)
    assert parse_recompute("budget:6e9").rules[0][1].amount == 6_000_000_000
    assert parse_recompute("budget:2 MB").rules[0][1].amount == 2_000_000
    table = parse_recompute({"blocks.0": "none", "blocks.*": "full"})
    assert str(table) == "blocks.0 none, blocks.* full"
    assert not parse_recompute({"a": "none"}).is_active
    assert parse_recompute("selective:gelu+dropout").rules[0][1].operations == ("gelu", "dropout")


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("ful", "Did you mean 'full'?"),
        ("every:0", "behind every stands a number above 0"),
        ("every", "e.g. 'every:4'"),
        ("budget:much", "e.g. 'budget:6 GiB'"),
        ("full:2", "full takes no number"),
        ("selective:", "names of operations"),
        ("selective:gelu+relu_", "names of operations"),
    ],
)
def test_other_words_are_refused(word: str, text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_recompute(word)
    assert caught.value.code == "E240"
    assert text in caught.value.message


@pytest.mark.parametrize(
    "value", ["none", "every:2", "selective:gelu+dropout", {"blocks.0": "none", "*": "full"}]
)
def test_a_plan_says_it_and_keeps_it_in_json(value) -> None:
    plan = make_plan(PlanRequest(recompute=parse_recompute(value)), world_size=2, global_batch=4)
    assert TrainPlan.from_json(plan.to_json()) == plan
    assert ("recompute" in plan.describe()) == (value != "none")
