"""What a loss may return: (sum, count), or a bare scalar that is a mean over samples."""

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.training.normaliser import sum_and_count

SAMPLES = [{"x": torch.full((3,), float(i + 1)), "label": torch.tensor(i % 2)} for i in range(4)]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))


def _per_sample(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def _mean(model: Any, batch: Any) -> torch.Tensor:
    return _per_sample(model, batch).mean()


def _batch(positions) -> dict[str, torch.Tensor]:
    return {key: torch.stack([SAMPLES[i][key] for i in positions]) for key in SAMPLES[0]}


def test_a_pair_is_taken_as_it_is() -> None:
    def pair(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return _per_sample(model, batch).sum(), len(batch["x"])

    assert sum_and_count(_model(), pair, SAMPLES[:1]) is pair


def test_a_mean_over_samples_becomes_a_sum_whatever_the_cut() -> None:
    model = _model().eval().requires_grad_(False)
    loss = sum_and_count(model, _mean, SAMPLES)
    whole, count = loss(model, _batch(range(4)))
    parts = [loss(model, _batch(cut)) for cut in (range(1), range(1, 4))]
    assert count == 4
    assert [part[1] for part in parts] == [1, 3]
    assert float(sum(part[0] for part in parts)) == pytest.approx(float(whole), rel=1e-6)
    assert float(whole) == pytest.approx(float(_per_sample(model, _batch(range(4))).sum()), rel=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: _per_sample(model, batch).sum(),
        lambda model, batch: _per_sample(model, batch).max(),
        lambda model, batch: (_per_sample(model, batch) * batch["x"][:, 0]).sum() / batch["x"][:, 0].sum(),
    ],
    ids=["sum", "maximum", "weighted mean"],
)
def test_a_scalar_whose_value_depends_on_the_cut_is_refused(loss) -> None:
    with pytest.raises(ConfigError) as caught:
        sum_and_count(_model(), loss, SAMPLES)
    assert caught.value.code == "E112"
    assert "not a mean over samples" in caught.value.message
    assert "for 4 samples" in caught.value.message
    assert "Return (sum, count)" in caught.value.message


def test_one_sample_cannot_show_what_a_scalar_is() -> None:
    with pytest.raises(ConfigError, match="1 sample cannot show") as caught:
        sum_and_count(_model(), _mean, SAMPLES[:1])
    assert caught.value.code == "E112"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "NoneType"),
        (1.5, "float"),
        (torch.ones(2), "Tensor"),
        ((torch.ones(()),) * 3, "tuple"),
        ({}, "dict"),
    ],
)
def test_anything_else_is_refused(value, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sum_and_count(_model(), lambda *_: value, SAMPLES)
    assert caught.value.code == "E111"
    assert f"must return (sum, count); it returned {kind}" in caught.value.message


def test_probing_changes_neither_the_model_nor_the_generator() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    sum_and_count(model, _mean, SAMPLES)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_mean_over_valid_labels_is_refused_however_the_ignored_ones_lie() -> None:
    """Each half of four samples has as many ignored labels as the other: only uneven cuts tell."""
    model = nn.Linear(3, 4)
    samples = [(torch.randn(3), torch.tensor(-100 if i % 3 == 0 else i % 4)) for i in range(4)]

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(ConfigError, match=r"E112 .*not a mean over samples"):
        sum_and_count(model, loss, samples)
