"""Map-style datasets over token corpora, and `open_data`, which turns `data.train` into one.

Owns how tokens become samples: packing, padding, labels, and the check against the model's vocabulary. Must
not know models, ranks or the order of samples.

Simplifications: packed samples may attend across document boundaries; of a file too long to be scanned at
start only the first 128 Mi ids are checked then, the rest as they are read.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.data.corpus import empty_corpus, standard_library
from meshwright.data.digits import DigitsDataset
from meshwright.data.hub_datasets import hub_corpus
from meshwright.data.identity import DataIdentity, Split
from meshwright.data.megatron import megatron_corpus
from meshwright.data.parquet import parquet_corpus
from meshwright.data.readers import jsonl_corpus, nanogpt_corpus, text_corpus
from meshwright.data.tokenizer import BYTES, FileEncoder, TextEncoder
from meshwright.data.tokens import Ids, TokenCorpus
from meshwright.errors import ConfigError

# The label that torch's cross entropy leaves out by default.
IGNORED_LABEL = -100
_START_CHECK_NUMEL = 1 << 27
_KINDS = {
    "stdlib": "stdlib",
    "digits": "digits",
    "text": "text:PATH",
    "jsonl": "jsonl:PATH",
    "nanogpt": "nanogpt:PATH",
    "parquet": "parquet:PATH",
    "megatron": "megatron:PREFIX",
    "hf": "hf:PATH_OR_ID",
}
_KIND_OF_SUFFIX = {".jsonl": "jsonl", ".bin": "nanogpt", ".parquet": "parquet", ".idx": "megatron"}


@dataclass(frozen=True)
class SequenceRule:
    """How a corpus becomes sequences.

    Attributes:
        seq_len: tokens per sample, T.
        vocab_size: ids the model knows, 0 .. vocab_size - 1; None checks nothing.
        packing: True concatenates the documents and cuts every T tokens; False makes one padded sample of
            each document.
        overlong: without packing, cut a document of more than T tokens ("truncate") or raise E107 ("error").
        encoder: makes ids of text.
    """

    seq_len: int
    vocab_size: int | None = None
    packing: bool = True
    overlong: Literal["truncate", "error"] = "truncate"
    encoder: TextEncoder = BYTES


class TokenDataset(Dataset[dict[str, Tensor]]):
    """Packed samples: item i is `{"tokens": int64 (T,), "labels": int64 (T,)}`.

    Tokens are ids [iT, iT + T) of the corpus, labels the ids one further on; neighbours share one id, so
    that every id but the first is a label once. A tail of fewer than T + 1 ids is left out.
    """

    def __init__(self, corpus: TokenCorpus, rule: SequenceRule) -> None:
        """Cut `corpus` by `rule`.

        Raises:
            ConfigError: E105 where there are fewer than T + 1 ids, E103 where an id is no word of the model.
        """
        self.corpus, self.rule = corpus, rule
        if len(self) < 1:
            raise empty_corpus(
                corpus.name,
                corpus.split,
                f"{len(corpus.tokens):,} tokens, one sample needs data.seq_len + 1 = {rule.seq_len + 1:,}",
            )
        _check_start(corpus, rule, lambda position: min(position // rule.seq_len, len(self) - 1))

    def __len__(self) -> int:
        return max(0, (len(self.corpus.tokens) - 1) // self.rule.seq_len)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside 0..{len(self) - 1}")
        start = index * self.rule.seq_len
        ids = self.corpus.tokens.read(start, start + self.rule.seq_len + 1)
        _check_sample(ids, self.corpus, self.rule, index)
        window = torch.from_numpy(ids.astype(np.int64))
        return {"tokens": window[:-1], "labels": window[1:]}

    def identity(self) -> DataIdentity:
        """What a run records of its data."""
        return self.corpus.identity(len(self))


class DocumentDataset(Dataset[dict[str, Tensor]]):
    """One document a sample: `{"tokens": int64 (T,), "labels": int64 (T,)}`, padded at the end.

    A document of n tokens has n labels, the last one being its separator. Padding has token 0 and label
    `IGNORED_LABEL`, so samples differ in their number of valid tokens.
    """

    def __init__(self, corpus: TokenCorpus, rule: SequenceRule) -> None:
        """Pad or cut the documents of `corpus` by `rule`.

        Raises:
            ConfigError: E108 where the corpus has no documents, E107 where one is too long and `rule` forbids
                cutting, E103 where an id is no word of the model.
        """
        if corpus.document_ends is None:
            raise ConfigError(
                "E108",
                f"data {corpus.name!r} does not say where its documents end, "
                "which data.packing = false needs; set data.packing = true, or give jsonl:PATH or a "
                "folder as text:PATH",
            )
        self.corpus, self.rule = corpus, rule
        self._ends: Ids = corpus.document_ends
        if len(self) < 1:
            raise empty_corpus(corpus.name, corpus.split, "it has no document")
        if rule.overlong == "error":
            self._refuse_overlong()
        _check_start(corpus, rule, self._sample_at)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside 0..{len(self) - 1}")
        start = int(self._ends.read(index - 1, index)[0]) if index else 0
        stop = min(int(self._ends.read(index, index + 1)[0]), start + self.rule.seq_len + 1)
        ids = self.corpus.tokens.read(start, stop)
        _check_sample(ids, self.corpus, self.rule, index)
        document = torch.from_numpy(ids.astype(np.int64))
        tokens = torch.zeros(self.rule.seq_len, dtype=torch.int64)
        labels = torch.full((self.rule.seq_len,), IGNORED_LABEL, dtype=torch.int64)
        tokens[: len(document) - 1] = document[:-1]
        labels[: len(document) - 1] = document[1:]
        return {"tokens": tokens, "labels": labels}

    def identity(self) -> DataIdentity:
        """What a run records of its data."""
        return self.corpus.identity(len(self))

    def _sample_at(self, position: int) -> int:
        return int(np.searchsorted(self._ends.read(0, len(self)), position, side="right"))

    def _refuse_overlong(self) -> None:
        # A document's separator is a label only: n tokens need a sequence of n.
        lengths = np.diff(self._ends.read(0, len(self)), prepend=0) - 1
        longest = int(lengths.argmax())
        if lengths[longest] > self.rule.seq_len:
            raise ConfigError(
                "E107",
                f"document {longest} of data {self.corpus.name!r} has {int(lengths[longest]):,} tokens, more "
                f'than data.seq_len = {self.rule.seq_len:,}; set data.overlong = "truncate", '
                f"data.packing = true, or data.seq_len = {int(lengths[longest])}",
            )


def open_data(
    spec: str, *, split: Split, sequences: SequenceRule, cache_dir: Path
) -> TokenDataset | DocumentDataset | DigitsDataset:
    """The dataset that `spec` names.

    Args:
        spec: `stdlib`, `digits`, `text:PATH`, `jsonl:PATH#KEY`, `nanogpt:PATH`, `parquet:PATH#COLUMN`,
            `megatron:PREFIX` or `hf:PATH_OR_ID@SPLIT#COLUMN`; what stands behind `#` and `@` may be left out.
        split: "train" and "heldout" are disjoint; "all" is the whole source, for one that is only evaluated.
        sequences: how tokens become samples; `digits` has none and does not look at it.
        cache_dir: folder for flattened text, made where it is missing.

    Raises:
        ConfigError: E108 unknown kind or unusable file, E105 nothing there, E103 id outside the vocabulary,
            E107 document too long, E115 package or cache folder not available.
    """
    kind, _, path = spec.partition(":")
    if kind not in _KINDS or (":" in _KINDS[kind]) != bool(path):
        raise _unknown_kind(spec, kind)
    if kind == "digits":
        return DigitsDataset(split)
    check_tokenizer(sequences.encoder, sequences.vocab_size)
    corpus = _open_corpus(kind, path, split, cache_dir, sequences.encoder)
    return TokenDataset(corpus, sequences) if sequences.packing else DocumentDataset(corpus, sequences)


def check_tokenizer(encoder: TextEncoder, vocab_size: int | None) -> None:
    """Raise E103 where a tokenizer has more ids than the model."""
    # Text of bytes seldom holds all 256: there the ids that occur count.
    if isinstance(encoder, FileEncoder) and vocab_size is not None and encoder.vocab_size > vocab_size:
        raise ConfigError(
            "E103",
            f"{encoder.path} has {encoder.vocab_size:,} ids, the model's vocabulary is {vocab_size:,}. "
            f"Set model.vocab_size={encoder.vocab_size}, or data.tokenizer to another one.",
        )


def _open_corpus(kind: str, path: str, split: Split, cache_dir: Path, encoder: TextEncoder) -> TokenCorpus:
    if kind == "stdlib":
        return standard_library(split, cache_dir, encoder=encoder)
    if kind == "text":
        return text_corpus(Path(path).expanduser(), split=split, cache_dir=cache_dir, encoder=encoder)
    if kind == "nanogpt":
        return nanogpt_corpus(Path(path).expanduser(), split=split)
    if kind == "megatron":
        return megatron_corpus(Path(path).expanduser(), split=split)
    if kind == "hf":
        return hub_corpus(path, split=split, cache_dir=cache_dir, encoder=encoder)
    name, mark, column = path.rpartition("#")
    if not mark or Path(path).expanduser().exists():
        name, column = path, ""
    file = Path(name).expanduser()
    if kind == "parquet":
        return parquet_corpus(file, column=column or None, split=split, cache_dir=cache_dir, encoder=encoder)
    return jsonl_corpus(file, key=column or "text", split=split, cache_dir=cache_dir, encoder=encoder)


def _unknown_kind(spec: str, kind: str) -> ConfigError:
    near = difflib.get_close_matches(kind.lower(), _KINDS, n=1)
    if kind in _KINDS:
        hint = f"Write {_KINDS[kind]}. "
    elif near:
        hint = f"Did you mean {_KINDS[near[0]]!r}? "
    elif Path(spec).suffix in _KIND_OF_SUFFIX or Path(spec).expanduser().exists():
        hint = f"Did you mean '{_KIND_OF_SUFFIX.get(Path(spec).suffix, 'text')}:{spec}'? "
    else:
        hint = ""
    return ConfigError("E108", f"data {spec!r} is no known source. {hint}Legal: {', '.join(_KINDS.values())}")


def _check_start(corpus: TokenCorpus, rule: SequenceRule, sample_at: Callable[[int], int]) -> None:
    limit = _id_limit(corpus, rule)
    if limit is None:
        return
    for start, ids in corpus.tokens.blocks(_START_CHECK_NUMEL):
        if int(ids.max()) >= limit or int(ids.min()) < 0:
            position = int(np.argmax((ids >= limit) | (ids < 0)))
            raise _foreign_id(corpus, limit, int(ids[position]), sample_at(start + position))


def _check_sample(ids: npt.NDArray[np.integer], corpus: TokenCorpus, rule: SequenceRule, index: int) -> None:
    limit = _id_limit(corpus, rule)
    if limit is not None and (int(ids.max()) >= limit or int(ids.min()) < 0):
        raise _foreign_id(corpus, limit, int(ids.max() if ids.max() >= limit else ids.min()), index)


def _id_limit(corpus: TokenCorpus, rule: SequenceRule) -> int | None:
    """The first id that the model does not know, or None where the ids' type can hold no foreign one."""
    kind = np.iinfo(corpus.tokens.dtype)
    if rule.vocab_size is None or (kind.min == 0 and kind.max < rule.vocab_size):
        return None
    return rule.vocab_size


def _foreign_id(corpus: TokenCorpus, limit: int, token: int, sample: int) -> ConfigError:
    largest = max(int(ids.max()) for _, ids in corpus.tokens.blocks(_START_CHECK_NUMEL))
    fix = f"Set model.vocab_size={max(largest, token) + 1}, or give" if token >= 0 else "Give"
    return ConfigError(
        "E103",
        f"data {corpus.name!r} has id {token:,} in sample {sample:,}, the model's vocabulary is {limit:,} "
        f"(ids 0..{limit - 1:,}). {fix} tokens of another tokenizer.",
    )
