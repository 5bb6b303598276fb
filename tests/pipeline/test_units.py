"""The parts of a model that a pipeline may be cut between, and what they cost."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from meshwright.errors import PlanError
from meshwright.partitioning.unit_costs import UnitCosts
from meshwright.pipeline.units import Units
from tests.pipeline.models import EncoderDecoder, Images, Pairs, UNet, pair_loss, pixel_loss
from tests.pipeline.test_cutting import make_gpt
from tests.verification.models import Tokens

CPU = torch.device("cpu")


def units_of(model, loss, data, samples=(1, 2)) -> Units:
    return Units.of(model, loss, lambda n: default_collate([data[i] for i in range(n)]), samples, device=CPU)


@pytest.fixture(scope="module")
def costs():
    model = UNet()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found = units_of(model, pixel_loss, Images()).measure()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    return found


def test_units_are_what_lies_between_cuts(costs):
    assert [unit.name for unit in costs.units] == ["", "down", "bottom", "up", "last", "head"]
    assert costs.samples == (1, 2)
    trained = sum(p.numel() * 4 for p in UNet().parameters())
    assert sum(unit.weight_bytes for unit in costs.units) == trained
    buffers = sum(b.numel() * b.element_size() for b in UNet().buffers())
    assert sum(unit.fixed_bytes for unit in costs.units) == buffers
    assert all(min(unit.forward) > 0 and min(unit.backward) > 0 for unit in costs.units)
    assert all(unit.kept_bytes[1] > 1.8 * unit.kept_bytes[0] > 0 for unit in costs.units)


def test_skips_are_tensors_to_later_units(costs):
    found = {(item.producer, item.consumers, item.bytes[0]) for item in costs.passed}
    whole, half = 4 * 8 * 8 * 4, 8 * 4 * 4 * 4
    assert {(0, (3,), whole), (0, (1,), whole / 4), (1, (2,), half), (1, (2,), half / 4)} <= found
    assert all(item.bytes[1] == 2 * item.bytes[0] for item in costs.passed)
    assert costs.chain(2).live_bytes[2] == 2 * (whole + half + half / 4)


def test_costs_travel_as_text(costs):
    assert UnitCosts.from_json(costs.to_json()) == costs


def test_shared_weights_are_ties():
    found = units_of(EncoderDecoder(101), pair_loss, Pairs(101, 7)).measure()
    (tie,) = found.ties
    assert (tie.users, tie.bytes, tie.name) == ((0, 3, 5), 101 * 16 * 4, "shared.weight")
    assert [unit.name for unit in found.units][3] == "shared call 2"


def test_equal_blocks_are_run_once_and_other_sizes_have_other_digests():
    from meshwright.models import language_model_loss

    made = [units_of(make_gpt(n), language_model_loss, Tokens(101, 7)) for n in (4, 4, 5)]
    costs = made[0].measure()  # on the meta device: nothing but what is run has memory
    blocks = [unit for unit in costs.units if unit.name.startswith("blocks")]
    assert len(blocks) == 4
    assert len({(block.forward, block.backward) for block in blocks}) == 1
    assert made[0].digest == made[1].digest != made[2].digest


class Picky(nn.Module):
    """Runs with at least three samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    def forward(self, x):
        if len(x) < 3:
            raise ValueError(f"{len(x)} samples are too few")
        return self.layers(x)


def picky_loss(model, batch):
    return model(batch["x"]).square().sum(), len(batch["x"])


class Threes:
    def __len__(self):
        return 9

    def __getitem__(self, index):
        return {"x": torch.full((3,), float(index))}


def test_sizes_at_which_the_model_does_not_run_are_left_out():
    assert units_of(Picky(), picky_loss, Threes(), (1, 2, 4)).measure().samples == (4,)
    with pytest.raises(PlanError, match=r"E276 .*none of 1, 2 samples .*ValueError: 1 samples are too few"):
        units_of(Picky(), picky_loss, Threes(), (1, 2))


def test_random_numbers_are_drawn_as_the_run_draws_them():
    from meshwright.models import language_model_loss

    entered: list[tuple[int, bool]] = []

    def randomness(samples: int):
        @contextmanager
        def around(is_forward: bool):
            entered.append((samples, is_forward))
            yield

        return around

    units_of(make_gpt(1), language_model_loss, Tokens(101, 7), (2,)).measure(randomness)
    assert set(entered) == {(2, True), (2, False)}
