"""Samples with one class each: texts and images of a table of rows, and the digits as images.

Owns how a row becomes tensors. Must not know models but by the shapes that they take. Rows are read one by one from
their memory-mapped table.
Simplification: images are resized whole, without crops or augmentation, and scaled to mean 0.5 and deviation 0.5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.data.corpus import split_indices
from meshwright.data.digits import DigitsDataset
from meshwright.data.hub_datasets import open_table
from meshwright.data.identity import Split
from meshwright.data.tokenizer import TextEncoder
from meshwright.errors import ConfigError

_LABELS = ("label", "labels")
_TEXTS = ("text", "sentence")
_IMAGES = ("image", "img", "pixel_values")
_DIGIT_SIDE = 8


class _Rows:
    """A split of the rows of `hf:SPEC`, with the column that is looked at and the one of classes."""

    def __init__(self, spec: str, split: Split, usual: tuple[str, ...], num_classes: int) -> None:
        self.name = f"hf:{spec}"
        table, wanted = open_table(spec)
        self.label = self._pick(table, None, _LABELS)
        self.column = self._pick(table, wanted, usual)
        self.table = table.select_columns([self.column, self.label])
        self.indices = split_indices([str(index) for index in range(len(table))], split)
        if not self.indices:
            raise ConfigError("E105", f"data {self.name!r} is empty for the {split} split: {len(table)} rows")
        labels = np.asarray(table.with_format("numpy")[self.label])
        if not np.issubdtype(labels.dtype, np.integer):
            raise ConfigError(
                "E108", f"column {self.label!r} of data {self.name!r} holds {labels.dtype}, no class numbers"
            )
        check_classes(self.name, int(labels.max()), num_classes)

    def _pick(self, table: Any, wanted: str | None, usual: tuple[str, ...]) -> str:
        for name in usual if wanted is None else (wanted,):
            if name in table.column_names:
                return name
        asked = repr(wanted) if wanted is not None else " or ".join(map(repr, usual))
        raise ConfigError(
            "E108", f"data {self.name!r} has no column {asked}; it has {', '.join(table.column_names)}"
        )

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not 0 <= index < len(self.indices):
            raise IndexError(f"sample {index} is outside 0..{len(self.indices) - 1}")
        row = self.table[self.indices[index]]
        return row[self.column], int(row[self.label])


def check_classes(name: str, largest: int, num_classes: int) -> None:
    """Raise E103 where a class has no output in the model."""
    if largest >= num_classes:
        raise ConfigError(
            "E103",
            f"data {name!r} has class {largest}, the model has {num_classes} (0..{num_classes - 1}). "
            f"Set model.num_labels={largest + 1}.",
        )


class ClassifiedTexts(Dataset[dict[str, Tensor]]):
    """Item: `input_ids` and `attention_mask` int64 (T,), `labels` int64 ()."""

    def __init__(
        self, spec: str, split: Split, *, encoder: TextEncoder, seq_len: int, pad: int, num_classes: int
    ) -> None:
        """Texts of `hf:SPEC`, cut or padded to `seq_len` tokens.

        Raises:
            ConfigError: as `open_table`; E108 for missing columns, E103 for a class that the model lacks.
        """
        self.rows = _Rows(spec, split, _TEXTS, num_classes)
        self.encoder = encoder
        self.seq_len = seq_len
        self.pad = pad

    def __len__(self) -> int:
        return len(self.rows.indices)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text, label = self.rows[index]
        ids = self.encoder.encode_whole(text, self.seq_len)
        tokens = torch.full((self.seq_len,), self.pad, dtype=torch.int64)
        tokens[: len(ids)] = torch.as_tensor(ids, dtype=torch.int64)
        mask = (torch.arange(self.seq_len) < len(ids)).long()
        return {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor(label)}


class ClassifiedImages(Dataset[dict[str, Tensor]]):
    """Item: `pixel_values` float32 (channels, side, side), `labels` int64 ()."""

    def __init__(self, spec: str, split: Split, *, channels: int, side: int, num_classes: int) -> None:
        """Images of `hf:SPEC`, resized to the model's.

        Raises:
            ConfigError: as `open_table`; E108 for missing columns, E103 for a class that the model lacks.
        """
        self.rows = _Rows(spec, split, _IMAGES, num_classes)
        self.channels = channels
        self.side = side

    def __len__(self) -> int:
        return len(self.rows.indices)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image, label = self.rows[index]
        image = image.convert("RGB" if self.channels == 3 else "L").resize((self.side, self.side))
        pixels = torch.from_numpy(np.array(image, dtype=np.float32)).view(self.side, self.side, -1)
        return {"pixel_values": pixels.permute(2, 0, 1) / 127.5 - 1, "labels": torch.tensor(label)}


class DigitImages(Dataset[dict[str, Tensor]]):
    """The handwritten digits as `ClassifiedImages` gives images: each pixel becomes a square."""

    def __init__(self, split: Split, *, channels: int, side: int, num_classes: int) -> None:
        """Enlarge the digits to `side`.

        Raises:
            ConfigError: E108 where `side` is no multiple of 8, E103 for fewer than ten classes, E115 without package.
        """
        if side % _DIGIT_SIDE:
            raise ConfigError(
                "E108", f'data "digits" has 8 x 8 pixels; the model\'s image_size {side} is no multiple of 8'
            )
        check_classes("digits", 9, num_classes)
        self.digits = DigitsDataset(split)
        self.channels = channels
        self.factor = side // _DIGIT_SIDE

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.digits[index]
        pixels = sample["inputs"].view(1, _DIGIT_SIDE, _DIGIT_SIDE).expand(self.channels, -1, -1) * 2 - 1
        pixels = pixels.repeat_interleave(self.factor, 1).repeat_interleave(self.factor, 2)
        return {"pixel_values": pixels, "labels": sample["labels"]}
