"""What a run records about the data it was trained on, so that two runs can be told apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# "train" and "heldout" are disjoint; "all" is both.
Split = Literal["train", "heldout", "all"]


@dataclass(frozen=True)
class DataIdentity:
    """Name and content of one split of a dataset.

    Attributes:
        name: the source as the user wrote it.
        split: "train", "heldout" or "all".
        sha256: hex digest of the content.
        num_samples: length of the dataset.
    """

    name: str
    split: Split
    sha256: str
    num_samples: int
