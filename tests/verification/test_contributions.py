"""What a rank puts into gradients is seen however it gets there, and seeing it changes no way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.adapt import linear
from meshwright.comm.log import CommLog
from meshwright.comm.ops import DataGroups, Group
from meshwright.layout.policy import find_policy
from meshwright.sharding.engine import ShardingEngine
from meshwright.verification.contributions import Contributions


@pytest.mark.parametrize("waits", [False, True])
def test_products_past_autograd_are_seen_and_stay_past_it(waits: bool) -> None:
    torch.manual_seed(0)
    model, deferral = (
        nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 2)).double(),
        linear.Deferral(),
    )
    group = Group("dp", (0,), 0, None, CommLog(0, 1))
    engine = ShardingEngine(
        model, policy=find_policy("ddp"), groups=DataGroups.of(group), device=torch.device("cpu")
    )
    linear.install(model, engine.gradients, deferral)
    seen = Contributions(dict(model.named_parameters()), deferral)
    engine.start_step()
    for number in range(2):
        total = model(torch.randn(4, 5, dtype=torch.float64)).square().sum()
        engine.start_microbatch(last=number == 1 and not waits)
        engine.start_backward()
        deferral.watch([total])
        deferral.is_on = waits
        total.backward()
        made = deferral.take()
        assert len(made) == (2 if waits else 0)
        engine.expect_gradients(last=number == 1)
        with torch.no_grad():
            for make in made:
                make()
        engine.finish_microbatch()
    for shard in engine.shards:
        flat = shard.gradient.flatten()
        found = seen.elements(shard.name, 0.5)
        assert found
        assert {place: pytest.approx(float(flat[place]) / 2, rel=1e-12) for place in found} == found
