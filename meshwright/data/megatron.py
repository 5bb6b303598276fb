"""Megatron's indexed data: `PREFIX.bin` with ids one after the other, `PREFIX.idx` with what is where.

Owns this format. Must not know sequences, batches or torch. Both files are memory-mapped; nothing is copied.
Source: `IndexedDataset` in NVIDIA's Megatron-LM (megatron/core/datasets/indexed_dataset.py). The index is
little-endian: 9 bytes `MMIDIDX\\0\\0`, u64 version 1, u8 code of the element type, u64 number of sequences, u64 number
of document marks; then int32 lengths of sequences, int64 byte offsets of sequences in `.bin`, int64 document marks (the
sequence with which each document starts, and at last the number of sequences), and for multimodal data int8 modes.
Simplification: sequences must lie in `.bin` in their order without gaps, as Megatron's own builder writes them.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.corpus import HELDOUT_DIVISOR, empty_corpus
from meshwright.data.identity import Split
from meshwright.data.readers import missing
from meshwright.data.tokens import TokenCorpus, TokenFile
from meshwright.errors import ConfigError

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


class DocumentEnds:
    """Exclusive ends of documents [first, last) in ids, counted from the first one's start; read from the map."""

    def __init__(self, marks: npt.NDArray[Any], starts: npt.NDArray[Any], total: int, part: range) -> None:
        """Args: document marks, first id of each sequence, ids in all, documents of the part."""
        self._marks, self._starts, self._total, self._part = marks, starts, total, part
        self.origin = self._first_id(int(marks[part.start])) if len(part) else 0

    def __len__(self) -> int:
        return len(self._part)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Ends of the documents [start, stop) of this part, int64."""
        first = self._part.start + start + 1
        sequences = np.asarray(self._marks[first : first + stop - start])
        ends = np.full(len(sequences), self._total, dtype=np.int64)
        inside = sequences < len(self._starts)
        ends[inside] = self._starts[sequences[inside]]
        return ends - self.origin

    def _first_id(self, sequence: int) -> int:
        return int(self._starts[sequence]) if sequence < len(self._starts) else self._total


def megatron_corpus(prefix: Path, *, split: Split) -> TokenCorpus:
    """The ids of `PREFIX.bin`; the last 5 % of documents are held out.

    Args:
        prefix: path without `.bin` and `.idx`; with one of them it is accepted too.
        split: "train", "heldout" or "all".

    Raises:
        ConfigError: E105 where a file is missing or the split empty, E108 where the files are not of this format.
    """
    name = f"megatron:{prefix}"
    if prefix.suffix in (".bin", ".idx"):
        prefix = prefix.with_suffix("")
    ids_path, index_path = (prefix.with_name(prefix.name + ending) for ending in (".bin", ".idx"))
    for path in (ids_path, index_path):
        if not path.is_file():
            raise missing(name, path)
    dtype, lengths, offsets, marks = _read_index(index_path)
    tokens = TokenFile(ids_path, dtype)
    starts = offsets // tokens.dtype.itemsize
    _check_order(index_path, tokens, lengths, offsets)
    marks = _without_empty(marks, starts, len(tokens))
    num_documents = len(marks) - 1
    # An index of one document has no document to hold out but a tail of ids.
    cut = num_documents - max(num_documents // HELDOUT_DIVISOR, min(1, num_documents - 1))
    part = {"train": range(cut), "heldout": range(cut, num_documents), "all": range(num_documents)}[split]
    ends = DocumentEnds(marks, starts, len(tokens), part)
    if not len(part):
        raise empty_corpus(name, split, f"{index_path} lists {num_documents} documents")
    stop = ends.origin + int(ends.read(len(part) - 1, len(part))[0])
    return TokenCorpus(name, split, tokens.part(ends.origin, stop), ends)


def _without_empty(marks: npt.NDArray[Any], starts: npt.NDArray[Any], total: int) -> npt.NDArray[Any]:
    """Marks of documents that hold an id; the map itself where all do."""
    everything = DocumentEnds(marks, starts, total, range(len(marks) - 1))
    filled = np.diff(everything.read(0, len(everything)), prepend=0) > 0
    return marks if filled.all() else np.append(marks[:-1][filled], marks[-1])


def _read_index(path: Path) -> tuple[str, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Type of an id, lengths and byte offsets of sequences, document marks."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or head[:9] != _MAGIC:
        raise ConfigError("E108", f"{path} is no Megatron index: it does not start with {_MAGIC!r}")
    _, version, code, num_sequences, num_marks = _HEADER.unpack(head)
    if version != 1:
        raise ConfigError("E108", f"{path} has index version {version}; version 1 is read")
    dtype = _DTYPES.get(code)
    if dtype is None or "f" in dtype:
        kind = f"of type {dtype}" if dtype else f"with type code {code}"
        raise ConfigError(
            "E108", f"{path} describes elements {kind}; token ids are integers (codes 1-5 and 8)"
        )
    needed = _HEADER.size + 12 * num_sequences + 8 * num_marks
    if size < needed or num_marks < 1:
        raise ConfigError(
            "E108",
            f"{path} has {size:,} bytes, its {num_sequences:,} sequences need {needed:,}: it was cut; build it again",
        )
    at = _HEADER.size
    lengths = (
        np.memmap(path, "<i4", mode="r", offset=at, shape=(num_sequences,))
        if num_sequences
        else np.empty(0, "<i4")
    )
    at += 4 * num_sequences
    offsets = (
        np.memmap(path, "<i8", mode="r", offset=at, shape=(num_sequences,))
        if num_sequences
        else np.empty(0, "<i8")
    )
    marks = np.memmap(path, "<i8", mode="r", offset=at + 8 * num_sequences, shape=(num_marks,))
    return dtype, lengths, offsets, marks


def _check_order(path: Path, tokens: TokenFile, lengths: npt.NDArray[Any], offsets: npt.NDArray[Any]) -> None:
    ends = np.cumsum(lengths, dtype=np.int64) * tokens.dtype.itemsize
    total, held = int(ends[-1]) if len(ends) else 0, len(tokens) * tokens.dtype.itemsize
    if total != held or not np.array_equal(offsets[1:], ends[:-1]):
        raise ConfigError(
            "E108",
            f"{path} lists {total:,} bytes of sequences, {tokens.path} has {held:,}, or they do not follow each "
            f"other; give the .bin and .idx that one preprocessing wrote",
        )
