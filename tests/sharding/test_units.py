"""Which modules become units, and who owns parameters that several modules share."""

import torch
from torch import nn

from meshwright.models.gpt import GPT, GPTConfig
from meshwright.sharding.units import assign_units, find_units, parameter_specs


def _assigned(model: nn.Module) -> dict[str, str]:
    return assign_units(model, find_units(model))


def test_children_of_a_sequential() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    assert find_units(model) == {"0": model[0], "2": model[2]}  # a module without parameters is no unit
    assert _assigned(model) == {"0.weight": "0", "0.bias": "0", "2.weight": "2", "2.bias": "2"}


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2)
        stages = [nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2)]
        self.stages = nn.ModuleList(stages)
        self.scale = nn.Parameter(torch.ones(2))


def test_only_the_outermost_list_makes_units() -> None:
    model = _Nested()
    assert list(find_units(model)) == ["stages.0", "stages.1"]
    owners = _assigned(model)
    assert owners["stages.1.0.weight"] == "stages.1"
    assert [owners[name] for name in ("embed.weight", "embed.bias", "scale")] == ["", "", ""]


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
        self.blocks.append(self.blocks[0])  # the same module twice
        self.blocks[2].weight = self.blocks[1].weight  # tied between two units
        self.head = nn.Linear(2, 2)
        self.head.bias = self.blocks[2].bias  # tied between a unit and the outside


def test_what_several_places_share_belongs_to_the_root() -> None:
    model = _Shared()
    assert list(find_units(model)) == ["blocks.0", "blocks.1", "blocks.2"]
    owners = _assigned(model)
    assert owners["blocks.1.weight"] == ""
    assert owners["blocks.2.bias"] == ""
    assert owners["blocks.1.bias"] == "blocks.1"
    assert owners["head.weight"] == ""
    assert "blocks.2.weight" not in owners  # a tied parameter appears once
    assert owners["blocks.0.weight"] == ""  # its module stands in two places


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)


def test_without_a_list_everything_is_the_root() -> None:
    assert find_units(_Plain()) == {}
    assert set(_assigned(_Plain()).values()) == {""}


def test_gpt_blocks_and_its_tied_head() -> None:
    config = GPTConfig(num_layers=2, dim=8, num_heads=2, ffn_dim=16, vocab_size=11, max_seq_len=4)
    owners = _assigned(GPT(config))
    assert {owner for owner in owners.values() if owner} == {"blocks.0", "blocks.1"}
    assert sorted(name for name, owner in owners.items() if not owner) == [
        "final_norm.bias",
        "final_norm.weight",
        "position_embedding.weight",
        "token_embedding.weight",
    ]


def test_parameters_as_numbers() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1).double())
    model[0].bias.requires_grad_(False)
    specs = [(s.name, s.shape, s.dtype, s.itemsize, s.trainable) for s in parameter_specs(model)]
    assert specs == [
        ("0.weight", (3, 2), "float32", 4, True),
        ("0.bias", (3,), "float32", 4, False),
        ("1.weight", (1, 3), "float64", 8, True),
        ("1.bias", (1,), "float64", 8, True),
    ]
