"""The handwritten digits that scikit-learn carries along: 1,797 images of 8 x 8 pixels, ten classes.

Owns this one dataset. Must not know models or batches. Source: Alpaydin and Kaynak, 1998 (UCI repository).
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.data.corpus import split_indices
from meshwright.data.identity import DataIdentity, Split
from meshwright.errors import ConfigError

_LARGEST_PIXEL = 16.0


class DigitsDataset(Dataset[dict[str, Tensor]]):
    """Item: `{"inputs": float32 (64,) in 0..1, "labels": int64 ()}`; split by a hash of the image's index."""

    def __init__(self, split: Split) -> None:
        """Load the images of one split.

        Raises:
            ConfigError: E115 where scikit-learn is not installed.
        """
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ConfigError(
                "E115", 'data "digits" needs scikit-learn, which is not installed: pip install scikit-learn'
            ) from error
        pixels, classes = load_digits(return_X_y=True)
        selected = split_indices([str(index) for index in range(len(classes))], split)
        self.split = split
        self.inputs = torch.from_numpy((pixels[selected] / _LARGEST_PIXEL).astype(np.float32))
        self.labels = torch.from_numpy(classes[selected].astype(np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}

    def identity(self) -> DataIdentity:
        """What a run records of its data."""
        digest = hashlib.sha256(self.inputs.numpy().tobytes() + self.labels.numpy().tobytes())
        return DataIdentity("digits", self.split, digest.hexdigest(), len(self))
