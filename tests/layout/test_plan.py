"""Plans as values: JSON keeps everything, and the text for people names what matters."""

import dataclasses
import json

import pytest

from meshwright.layout.plan import TrainPlan
from meshwright.layout.policy import find_policy
from meshwright.mesh import MeshSpec


def _plan(policy: str, dp: int = 4) -> TrainPlan:
    return TrainPlan(MeshSpec.of(dp_shard=dp), find_policy(policy), 48, 6, 48 // (6 * dp), precision="fp64")


@pytest.mark.parametrize("policy", ["ddp", "zero1", "zero2", "zero3"])
def test_json_round_trip(policy: str) -> None:
    plan = _plan(policy)
    assert TrainPlan.from_json(plan.to_json()) == plan
    assert TrainPlan.from_json(plan.to_json()).to_json() == plan.to_json()


def test_json_keeps_changes_of_the_policy_row() -> None:
    row = dataclasses.replace(find_policy("zero3"), keep_last=False, bucket_bytes=4096, alignment_numel=1)
    plan = dataclasses.replace(_plan("zero3"), policy=row)
    assert TrainPlan.from_json(plan.to_json()).policy == row


def test_json_is_readable_by_others() -> None:
    value = json.loads(_plan("zero2").to_json())
    assert value["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1}
    assert (value["policy"]["name"], value["micro_batch"], value["num_microbatches"]) == ("zero2", 6, 2)


def test_description() -> None:
    assert _plan("zero2").describe() == "zero2x4 · micro 6 x accumulate 2 · fp64"
    assert _plan("ddp", dp=1).describe() == "ddp · micro 6 x accumulate 8 · fp64"
