"""Calls counted use by use: the closed form where units are used in order, by hand where they are not."""

import dataclasses

import pytest

from meshwright.layout.accounting import declared_calls
from meshwright.layout.bucket import ParameterSpec, Unit, make_bucket
from meshwright.layout.policy import find_policy
from meshwright.layout.uses import UnitUses, calls_of_uses

BLOCKS = ("a", "b", "c")


def units(num_shards, *, root=True):
    names = ("", *BLOCKS) if root else BLOCKS
    return tuple(
        Unit(
            name,
            (
                make_bucket(
                    name,
                    [ParameterSpec(f"{name}.weight", (4,), "float32", 4)],
                    num_shards=num_shards,
                    alignment_numel=1,
                ),
            ),
        )
        for name in names
    )


def used(forwards, backwards=None):
    """Every call has a backward; they start in reverse order unless given."""
    order = tuple(reversed(forwards)) if backwards is None else tuple(backwards)
    pairs = [tuple((name, True) for name in names) for names in (forwards, order)]
    return UnitUses(*pairs, trained=frozenset(f"{name}.weight" for name in forwards))


@pytest.mark.parametrize("keep_last", [True, False])
@pytest.mark.parametrize("root", [True, False])
def test_in_order_it_is_the_closed_form(root, keep_last):
    policy, made = dataclasses.replace(find_policy("zero3"), keep_last=keep_last), units(2, root=root)
    for calls in calls_of_uses(policy, made, [used(BLOCKS)] * 2):
        assert calls == declared_calls(policy, made, num_microbatches=1)


def test_one_rank_communicates_nothing():
    assert calls_of_uses(find_policy("zero3"), units(1), [used(BLOCKS)]) == [{}]


@pytest.mark.parametrize(
    ("forwards", "gathers"),
    [
        # Root, a (ahead), c, b (ahead of the second), c (ahead of the third, for nothing); backward a, b, c.
        (("c", "b", "a"), [8, 7]),
        # Root, a, b, c (ahead, for nothing), a; backward a, b, and a stays for its second backward.
        (("a", "b", "a"), [7, 6]),
        # a is freed between its calls, both times.
        (("a", "a", "b", "c"), [8, 8]),
        (("b",), [4, 3]),
    ],
)
def test_out_of_order(forwards, gathers):
    calls = calls_of_uses(find_policy("zero3"), units(2), [used(forwards)] * 2)
    assert [one["all_gather"] for one in calls] == gathers
    assert [one["reduce_scatter"] for one in calls] == [1 + len(set(forwards))] * 2


def test_a_block_without_backward_is_not_reduced():
    uses = UnitUses((("a", True), ("b", False)), (("a", True),), frozenset({"a.weight"}))
    assert calls_of_uses(find_policy("zero3"), units(2), [uses])[0]["reduce_scatter"] == 2
