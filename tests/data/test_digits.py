import sys

import pytest
import torch

from meshwright.data.digits import DigitsDataset
from meshwright.errors import ConfigError


def test_digits_are_split_into_disjoint_images_between_zero_and_one():
    train, heldout, both = (DigitsDataset(split) for split in ("train", "heldout", "all"))
    assert len(both) == 1797 == len(train) + len(heldout)
    assert 50 < len(heldout) < 150
    assert set(train.labels.tolist()) == set(heldout.labels.tolist()) == set(range(10))
    item = train[0]
    assert item["inputs"].shape == (64,)
    assert item["inputs"].dtype == torch.float32
    assert item["labels"].dtype == torch.int64
    assert (train.inputs.min(), train.inputs.max()) == (0.0, 1.0)
    assert sorted(map(tuple, torch.cat([train.inputs, heldout.inputs]).tolist())) == sorted(
        map(tuple, both.inputs.tolist())
    )


def test_digits_tell_what_they_are():
    once, again, heldout = DigitsDataset("train"), DigitsDataset("train"), DigitsDataset("heldout")
    assert once.identity() == again.identity()
    assert once.identity().sha256 != heldout.identity().sha256
    assert heldout.identity().num_samples == len(heldout)


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r"^E115 .*needs scikit-learn.*pip install scikit-learn"):
        DigitsDataset("train")
