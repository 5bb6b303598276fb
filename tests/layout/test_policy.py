"""The table of policies: names, aliases, what each shards, and the error of an unknown one."""

import pytest

from meshwright.errors import PlanError
from meshwright.layout.policy import DEFAULT_BUCKET_BYTES, POLICY_NAMES, find_policy


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("ddp", "ddp"),
        ("ZeRO1", "zero1"),
        ("fsdp", "zero3"),
        ("zero0", "ddp"),
        (0, "ddp"),
        (2, "zero2"),
        ("3", "zero3"),
    ],
)
def test_names_stages_and_aliases(asked, name) -> None:
    assert find_policy(asked).name == name


def test_each_stage_shards_one_thing_more() -> None:
    rows = [find_policy(stage) for stage in range(4)]
    assert POLICY_NAMES == ("ddp", "zero1", "zero2", "zero3")
    assert [row.shards_optimizer for row in rows] == [False, True, True, True]
    assert [row.shards_gradients for row in rows] == [False, False, True, True]
    assert [row.shards_parameters for row in rows] == [False, False, False, True]


def test_bucket_bytes_can_be_chosen() -> None:
    assert find_policy("zero1").bucket_bytes == DEFAULT_BUCKET_BYTES
    assert find_policy("zero1", bucket_bytes=1 << 20).bucket_bytes == 1 << 20


@pytest.mark.parametrize(
    ("asked", "hint"),
    [("zer03", "Did you mean 'zero3'?"), (7, "known: ddp, zero1, zero2, zero3."), ("pipeline", "known: ")],
)
def test_unknown_names_get_the_known_ones(asked, hint) -> None:
    with pytest.raises(PlanError) as caught:
        find_policy(asked)
    assert caught.value.code == "E204"
    assert f"unknown sharding policy {asked!r}" in caught.value.message
    assert hint in caught.value.message
