"""Token files: memory-mapped flat arrays of token ids, and the cache in which documents are flattened once.

Owns the files' layout and their safe construction by several processes at once. Must not know what text the
tokens stand for, nor torch.

Simplifications: tokens have a fixed width; a cache entry that is no longer wanted is never removed, and a
killed build leaves its `.part` file behind.
"""

from __future__ import annotations

import array
import hashlib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from meshwright.data.identity import DataIdentity, Split
from meshwright.data.tokenizer import BYTES, Encoder
from meshwright.errors import ConfigError

_BLOCK_NUMEL = 1 << 22


class TokenFile:
    """A read-only memory-mapped array of token ids, or the part [start, stop) of one.

    The map is opened at the first read and not carried along by pickle, so that a worker process opens its
    own; the pages are shared by all ranks of a machine.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike, *, start: int = 0, stop: int | None = None) -> None:
        """Open `path` as an array of `dtype`.

        Raises:
            ConfigError: E105 where the file is missing, E108 where its size is no multiple of `dtype`'s.
        """
        self.path = path
        self.dtype = np.dtype(dtype)
        if not path.is_file():
            raise ConfigError("E105", f"{path}: no such file; give the path of a file that exists")
        num_bytes = path.stat().st_size
        if num_bytes % self.dtype.itemsize:
            raise ConfigError(
                "E108",
                f"{path} has {num_bytes:,} bytes, no multiple of the {self.dtype.itemsize} bytes of a "
                f"{self.dtype.name} id; give a file of raw {self.dtype.name} ids, "
                "or text:PATH for plain text",
            )
        numel = num_bytes // self.dtype.itemsize
        self.start = start
        self.stop = numel if stop is None else stop
        assert 0 <= self.start <= self.stop <= numel, (
            f"[{start}, {stop}) is outside the {numel} ids of {path}"
        )
        self._map: npt.NDArray[Any] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (self.path, self.dtype, self.start, self.stop))

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Ids [start, stop) as a read-only view of shape (stop - start,); no copy."""
        assert 0 <= start <= stop <= len(self), (
            f"[{start}, {stop}) is outside the {len(self)} ids of {self.path}"
        )
        if start == stop:
            return np.empty(0, self.dtype)
        if self._map is None:
            self._map = np.memmap(self.path, self.dtype, mode="r")
        return self._map[self.start + start : self.start + stop]

    def part(self, start: int, stop: int) -> TokenFile:
        """The ids [start, stop) as a token file of their own."""
        return TokenFile(self.path, self.dtype, start=self.start + start, stop=self.start + stop)

    def blocks(self, limit: int | None = None) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Pairs (start, ids) that cover the first `limit` ids in order (default: all), a few MiB each."""
        total = len(self) if limit is None else min(limit, len(self))
        for start in range(0, total, _BLOCK_NUMEL):
            yield start, self.read(start, min(start + _BLOCK_NUMEL, total))

    def sha256(self) -> str:
        """Hex digest of the ids' bytes: what a run was trained on. Reads everything."""
        digest = hashlib.sha256()
        for _, ids in self.blocks():
            digest.update(np.ascontiguousarray(ids).data)
        return digest.hexdigest()


def _reopen(path: Path, dtype: npt.DTypeLike, start: int, stop: int) -> TokenFile:
    return TokenFile(path, dtype, start=start, stop=stop)


class Ids(Protocol):
    """What can be read like a `TokenFile`."""

    def __len__(self) -> int: ...
    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Numbers [start, stop)."""
        ...


@dataclass(frozen=True)
class TokenCorpus:
    """The tokens of one split of one source.

    Attributes:
        name: the source as the user wrote it, e.g. `text:notes`.
        split: "train", "heldout" or "all".
        tokens: the documents' ids one after the other, each with what ends it.
        document_ends: exclusive end of each document in `tokens`, separator included, ascending; None where
            the source does not say where its documents end.
    """

    name: str
    split: Split
    tokens: TokenFile
    document_ends: Ids | None = None

    def identity(self, num_samples: int) -> DataIdentity:
        """What a run records of a dataset of `num_samples` made of this corpus. Reads everything."""
        return DataIdentity(self.name, self.split, self.tokens.sha256(), num_samples)


def cached_documents(
    cache_dir: Path,
    key: str,
    documents: Callable[[], Iterable[Any]],
    *,
    encoder: Encoder = BYTES,
) -> tuple[TokenFile, TokenFile]:
    """Ids and ends of `documents`, encoded and flattened into `cache_dir` at the first call for `key` and `encoder`.

    Safe when several processes build the same entry: each writes files of its own and moves them into place,
    the last one wins, and since `key` stands for the content all are equal. Empty documents are left out.

    Args:
        cache_dir: made where it is missing.
        key: stands for the documents.
        documents: called where the entry is missing; what it yields is what `encoder` takes.
        encoder: makes ids of documents.

    Returns:
        Token file of the encoder's type and document ends (int64), as in `TokenCorpus`.

    Raises:
        ConfigError: E115 where the folder cannot be written.
    """
    name = f"{key}-{encoder.key}" if encoder.key else key
    tokens_path, ends_path = cache_dir / f"{name}.tokens", cache_dir / f"{name}.ends"
    # The ends are moved into place before the tokens: where the tokens exist, both are complete.
    if not tokens_path.exists():
        _require_writable(cache_dir)
        with _replaced(tokens_path) as tokens_file, _replaced(ends_path) as ends_file:
            ends = _write_documents(tokens_file, documents(), encoder)
            ends_file.write(np.asarray(ends, dtype=np.int64).tobytes())
    return TokenFile(tokens_path, encoder.dtype), TokenFile(ends_path, np.int64)


def _write_documents(file: BinaryIO, documents: Iterable[Any], encoder: Encoder) -> array.array[int]:
    ends, total = array.array("q"), 0
    after = b"" if encoder.separator is None else np.asarray([encoder.separator], encoder.dtype).tobytes()
    width = np.dtype(encoder.dtype).itemsize
    for ids in encoder.encode(documents):
        if len(ids):
            total += (file.write(np.ascontiguousarray(ids).data) + file.write(after)) // width
            ends.append(total)
    return ends


def _require_writable(cache_dir: Path) -> None:
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "E115",
            f"the cache folder {cache_dir} cannot be made ({error.strerror}); "
            "set data.cache_dir to a folder that this user may write",
        ) from error
    if not os.access(cache_dir, os.W_OK | os.X_OK):
        raise ConfigError(
            "E115",
            f"the cache folder {cache_dir} is not writable; "
            "set data.cache_dir to a folder that this user may write",
        )


@contextmanager
def _replaced(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under `path` complete at the end of the block, or not at all."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            # Without it a machine that loses power may keep the new name without its content.
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
