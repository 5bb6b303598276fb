"""A model over several devices of one process: what is kept in place, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.layout.bucket import make_bucket
from meshwright.layout.grouping import Division, group_by_size
from meshwright.layout.policy import find_policy
from meshwright.sharding.placement import check_devices, devices_of, place_of, several_devices
from meshwright.sharding.units import parameter_specs
from meshwright.testing.ranks import local_mesh
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.state import TrainState
from meshwright.training.step import train_step

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


def test_only_several_devices_of_the_runs_kind_keep_a_model_in_place() -> None:
    spread = {"a": FIRST, "b": SECOND}
    assert several_devices(spread, "cuda") == spread
    assert several_devices({"a": FIRST, "b": FIRST}, "cuda") == {}
    assert several_devices({"a": FIRST, "b": torch.device("cpu")}, "cuda") == {}
    assert several_devices(spread, "cpu") == {}
    assert devices_of(nn.Linear(2, 2), torch.device("cpu")) == {}


def test_buckets_of_a_spread_model_are_cut_by_device() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    places = {name: FIRST if name.startswith("0") else SECOND for name, _ in model.named_parameters()}
    specs = parameter_specs(model, None, places)
    (unit,) = group_by_size(specs, Division(2, 1), bucket_bytes=1 << 20)
    assert [place_of(bucket, torch.device("cpu")) for bucket in unit.buckets] == [SECOND, FIRST]
    plain = make_bucket("b", parameter_specs(model), num_shards=1, alignment_numel=1)
    assert place_of(plain, torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize(
    ("policy", "offload", "what"), [("zero2", False, "plan.zero = 2"), ("ddp", True, "plan.offload")]
)
def test_shards_of_a_spread_model_are_refused(policy: str, offload: bool, what: str) -> None:
    places = {"a": FIRST, "b": SECOND}
    check_devices(places, find_policy("ddp"), offload=False)
    check_devices({}, find_policy(policy), offload=offload)
    with pytest.raises(PlanError) as caught:
        check_devices(places, find_policy(policy), offload=offload)
    assert caught.value.code == "E213"
    assert (
        f"the model lies on cuda:0, cuda:1, and {what} keeps what it holds on one device."
        in caught.value.message
    )


class Spread(nn.Module):
    """Two layers on two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4).to(FIRST)
        self.second = nn.Linear(4, 3).to(SECOND)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.to(FIRST)).to(SECOND))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs in one process")
def test_a_spread_model_trains_under_ddp() -> None:
    from meshwright.sharding.engine import ShardingEngine

    torch.manual_seed(0)
    model = Spread()
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    plain[0].load_state_dict(model.first.state_dict())
    plain[1].load_state_dict(model.second.state_dict())
    x = torch.randn(5, 4)
    groups = local_mesh().data_groups()
    engine = ShardingEngine(model, policy=find_policy("ddp"), groups=groups, device=FIRST)
    state = TrainState(
        engine, ShardedOptimizer(OptimizerSpec("sgd", lr=0.1, weight_decay=0.0), engine.shards)
    )
    train_step(
        state,
        lambda _: x,
        loss=lambda m, batch: (m(batch).square().sum(), len(batch)),
        num_microbatches=1,
        lr=0.1,
        clip_norm=None,
    )
    (plain(x).square().sum() / len(x)).backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(parameter.cpu(), expected.detach() - 0.1 * expected.grad)
