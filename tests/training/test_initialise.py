"""A user's model built on the meta device gets the same values on every mesh."""

import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.layout.policy import find_policy
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.initialise import materialise_buffers, reset_copy, reset_initialiser


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7) for _ in range(3)])
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def _meta() -> _Net:
    with torch.device("meta"):
        return _Net()


def _pieces(mesh, policy: str) -> list:
    model = _meta()
    materialise_buffers(model, 5)
    engine = ShardingEngine(
        model,
        policy=find_policy(policy),
        groups=mesh.data_groups(),
        device=torch.device("cpu"),
        initialiser=reset_initialiser(model, 5),
    )
    assert torch.equal(model.norm.running_var, torch.ones(7))
    return [(s.name, s.piece.start, s.parameter.detach().flatten().clone()) for s in engine.shards]


@pytest.mark.parametrize("policy", ["ddp", "zero3"])
def test_values_do_not_depend_on_the_mesh(ranks, policy: str) -> None:
    expected = {}
    for name, module in _meta().named_modules():
        if list(module.parameters(recurse=False)):
            twin = reset_copy(module, name, 5)
            expected |= {f"{name}.{key}": p.detach().flatten() for key, p in twin.named_parameters()}
    assert not torch.equal(expected["blocks.0.weight"], expected["blocks.1.weight"])
    for world in (1, 3):
        for pieces in ranks.run(_pieces, world, policy):
            for name, start, values in pieces:
                assert torch.equal(values, expected[name][start : start + len(values)])


def test_a_module_that_cannot_reset_itself_is_named() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(Scale())
    with pytest.raises(ConfigError, match=r"E111.*'0\.factor'.*Scale.*reset_parameters"):
        reset_initialiser(model, 0)
