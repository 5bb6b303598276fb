"""Megatron's .bin and .idx, written here by the format's description."""

import struct

import numpy as np
import pytest

from meshwright.data.dataset import SequenceRule, open_data
from meshwright.data.megatron import megatron_corpus
from meshwright.errors import ConfigError

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write(prefix, documents, dtype="int32", *, modes=False):
    """`documents` are lists of sequences; each sequence is a list of ids."""
    sequences = [np.asarray(ids, dtype) for document in documents for ids in document]
    lengths = [len(ids) for ids in sequences]
    marks = np.cumsum([0, *(len(document) for document in documents)])
    offsets = (np.cumsum([0, *lengths])[:-1] if lengths else np.zeros(0)) * np.dtype(dtype).itemsize
    prefix.with_suffix(".bin").write_bytes(b"".join(ids.tobytes() for ids in sequences))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(marks))
        + np.asarray(lengths, "<i4").tobytes()
        + np.asarray(offsets, "<i8").tobytes()
        + np.asarray(marks, "<i8").tobytes()
        + (np.zeros(len(sequences), "i1").tobytes() if modes else b"")
    )
    return prefix


def documents_of(corpus):
    ends = corpus.document_ends.read(0, len(corpus.document_ends)).tolist()
    return [corpus.tokens.read(start, end).tolist() for start, end in zip([0, *ends[:-1]], ends, strict=True)]


MANY = [[[10 + index, 1], [2] * (index % 3), [0]] for index in range(60)]
FLAT = [[ids for sequence in document for ids in sequence] for document in MANY]


@pytest.mark.parametrize("dtype", [name for name in CODES if "float" not in name])
def test_documents_are_what_was_written(tmp_path, dtype):
    prefix = write(tmp_path / "d", MANY, dtype, modes=dtype == "int64")
    parts = {split: megatron_corpus(prefix, split=split) for split in ("train", "heldout", "all")}
    assert documents_of(parts["all"]) == FLAT
    assert documents_of(parts["train"]) == FLAT[:57]
    assert documents_of(parts["heldout"]) == FLAT[57:]
    assert parts["all"].tokens.dtype == np.dtype(dtype)
    assert isinstance(parts["train"].tokens.read(0, 2).base, np.memmap)
    assert (
        parts["heldout"].document_ends.read(1, 3).tolist()
        == np.cumsum([len(d) for d in FLAT[57:]])[1:].tolist()
    )


def test_empty_documents_are_left_out(tmp_path):
    prefix = write(tmp_path / "d", [[], [[1, 2]], [[]], [[3]], []])
    assert documents_of(megatron_corpus(prefix.with_suffix(".idx"), split="all")) == [[1, 2], [3]]


def test_samples_packed_and_by_document(tmp_path):
    prefix = write(tmp_path / "d", MANY, "uint16")
    packed = open_data(
        f"megatron:{prefix}",
        split="all",
        sequences=SequenceRule(5, vocab_size=70),
        cache_dir=tmp_path / "cache",
    )
    joined = [ids for document in FLAT for ids in document]
    assert packed[2]["tokens"].tolist() == joined[10:15]
    assert packed[2]["labels"].tolist() == joined[11:16]
    rule = SequenceRule(5, packing=False)
    single = open_data(
        f"megatron:{prefix}.bin", split="heldout", sequences=rule, cache_dir=tmp_path / "cache"
    )
    assert len(single) == 3
    assert single[1]["tokens"].tolist() == [*FLAT[58][:-1], 0, 0][:5]
    assert single[1]["labels"].tolist() == [*FLAT[58][1:], -100, -100][:5]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("dtype", "bad"), [("int32", -3), ("int8", -1), ("uint16", 70)])
def test_ids_outside_the_vocabulary_are_named(tmp_path, dtype, bad):
    prefix = write(tmp_path / "d", [[[5] * 20 + [bad]], [[1, 2]]], dtype)
    rule = SequenceRule(4, vocab_size=70)
    with pytest.raises(ConfigError, match=rf"^E103 data 'megatron:.*has id {bad} in sample 4, .* is 70 "):
        open_data(f"megatron:{prefix}", split="all", sequences=rule, cache_dir=tmp_path)


def _cut(prefix):
    path = prefix.with_suffix(".idx")
    path.write_bytes(path.read_bytes()[:-9])


def _swap(prefix):
    path = prefix.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-2])


def _text(prefix):
    prefix.with_suffix(".idx").write_text("this is no index at all, but it is long enough")


def _version(prefix):
    path = prefix.with_suffix(".idx")
    path.write_bytes(path.read_bytes()[:9] + struct.pack("<Q", 2) + path.read_bytes()[17:])


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_cut, r"^E108 .*d\.idx has [\d,]+ bytes, its 180 sequences need [\d,]+: it was cut"),
        (
            _swap,
            r"^E108 .*d\.idx lists [\d,]+ bytes of sequences, .*d\.bin has [\d,]+, or they do not follow",
        ),
        (_text, r"^E108 .*d\.idx is no Megatron index"),
        (_version, r"^E108 .*has index version 2; version 1 is read"),
        (lambda prefix: prefix.with_suffix(".idx").unlink(), r"^E105 data 'megatron:.*d\.idx does not exist"),
        (lambda prefix: prefix.with_suffix(".bin").unlink(), r"^E105 data 'megatron:.*d\.bin does not exist"),
    ],
)
def test_unusable_files_are_named(tmp_path, spoil, text):
    prefix = write(tmp_path / "d", MANY, "uint16")
    spoil(prefix)
    with pytest.raises(ConfigError, match=text):
        megatron_corpus(prefix, split="all")


def test_floats_and_splits_without_documents_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"^E108 .*elements of type <f4; token ids are integers"):
        megatron_corpus(write(tmp_path / "f", [[[1.5]]], "float32"), split="all")
    with pytest.raises(ConfigError, match=r"^E105 .*empty for the heldout split: .* lists 1 documents"):
        megatron_corpus(write(tmp_path / "one", [[[1]]]), split="heldout")
    with pytest.raises(ConfigError, match=r"^E105 .*empty for the all split: .* lists 0 documents"):
        megatron_corpus(write(tmp_path / "none", []), split="all")
