import pytest
import torch
from torch import nn

from meshwright.verification.observe import ModuleObserver, Rows, probe_rows
from tests.verification.models import Peculiar, two_losses
from tests.verification.models import Rows as Data


class Mixed(nn.Module):
    """Outputs with samples first, second, folded into rows, in none, and mixed with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Identity()
        self.folded = nn.Identity()
        self.positions = nn.Embedding(5, 4)
        self.sorted = nn.Identity()
        self.mean = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.second(x.transpose(0, 1)).transpose(0, 1)
        x = self.folded(x.flatten(0, 1)).view(x.shape)
        x = x + self.positions(torch.arange(5))
        x = self.sorted(x.sort(dim=0).values)
        return x - self.mean(x.mean(0))


def test_rows_of_samples_are_found():
    torch.manual_seed(0)
    x = torch.randn(4, 5, 3)
    rows = probe_rows(Mixed(), lambda model, batch: model(batch), lambda a, b: x[a:b], num_samples=4, seed=0)
    assert rows == {
        "first": Rows(0),
        "second": Rows(1),
        "folded": Rows(0, 5),
        "positions": Rows(None),
    }


def test_an_output_of_chosen_samples_has_no_rows_for_all():
    samples = [Data()[i] for i in range(8)]
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    rows = probe_rows(
        Peculiar(),
        two_losses,
        lambda a, b: {key: value[a:b] for key, value in batch.items()},
        num_samples=8,
        seed=0,
    )
    assert rows["first"] == Rows(0)
    assert rows["(model)"] == rows["(model) output 1"] == Rows(0)
    assert "rare" not in rows


def test_parts_that_are_too_small_for_a_layer():
    """A normalisation without running statistics needs two samples also in evaluation: what ran before it counts."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 1))
    x = torch.arange(6.0).view(2, 3)
    rows = probe_rows(model, lambda m, batch: m(batch), lambda a, b: x[a:b], num_samples=2, seed=0)
    assert rows == {"0": Rows(0)}
    with pytest.raises(ValueError, match="more than 1 value"):  # the whole micro-step cannot run
        probe_rows(model, lambda m, batch: m(batch), lambda a, b: x[:1], num_samples=1, seed=0)


def test_a_probe_leaves_the_model_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    x = torch.arange(12.0).view(4, 3)
    rows = probe_rows(model, lambda m, batch: m(batch), lambda a, b: x[a:b], num_samples=4, seed=0)
    assert rows["1"] == rows["2"] == Rows(0)
    assert torch.equal(torch.rand(3), expected)
    assert model.training
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert not model[0]._forward_hooks


def test_calls_are_numbered_and_only_seen_inside():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    observer = ModuleObserver(model)
    seen: list[str] = []
    model(torch.ones(1, 2))
    with observer.forward(lambda name, _tensor: seen.append(name)):
        model(torch.ones(1, 2))
    assert seen == ["0", "1", "0 call 2", "(model)"]
    assert observer.calls("0") == 2
    assert list(observer.order) == ["", "0", "1"]
    observer.close()
    with observer.forward(lambda name, _tensor: seen.append(name)):
        model(torch.ones(1, 2))
    assert len(seen) == 4
