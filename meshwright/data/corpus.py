"""Corpora made of files, above all Python's own standard library, and the split into train and held-out.

Owns which files belong to a corpus, their order, and which of them are held out. Must not know sequences,
batches or torch. Tokens are bytes unless an encoder is given, so nothing has to be downloaded or trained first.

Simplifications: a file is read whole into memory while the cache is built; a cache entry is recognised by its
files' paths, sizes and modification times, not by reading them again.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.data.identity import Split
from meshwright.data.tokenizer import BYTES, Encoder
from meshwright.data.tokens import TokenCorpus, cached_documents
from meshwright.errors import ConfigError

# One document in twenty is held out.
HELDOUT_DIVISOR = 20
_CACHE_FORMAT = "1"
_LEFT_OUT_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
)
# Generated at build time: they hold the paths and compiler of one machine, so no two machines would agree.
_GENERATED_PREFIXES = ("_sysconfigdata", "config-")


def standard_library(
    split: Split, cache_dir: Path, *, root: Path | None = None, encoder: Encoder = BYTES
) -> TokenCorpus:
    """The source of the installed standard library without its tests: about 12 MB of real text anywhere.

    Its content follows the Python version; `TokenFile.sha256` records it.

    Args:
        split: files held out are chosen by a hash of their path inside the library, about 5 %.
        cache_dir: folder of the flattened text.
        root: the library's folder; default is the one of the running interpreter.
        encoder: makes ids of text.

    Raises:
        ConfigError: E105 where no source file is found.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files = list(_library_files(folder))
    return folder_corpus("stdlib", folder, files, split=split, cache_dir=cache_dir, encoder=encoder)


def _library_files(root: Path) -> Iterator[Path]:
    for folder, folder_names, file_names in os.walk(root):
        folder_names[:] = [
            name
            for name in folder_names
            if name not in _LEFT_OUT_FOLDERS and not name.startswith(_GENERATED_PREFIXES)
        ]
        for name in file_names:
            if name.endswith(".py") and not name.startswith(_GENERATED_PREFIXES):
                yield Path(folder, name)


def folder_corpus(
    name: str,
    root: Path,
    files: Sequence[Path],
    *,
    split: Split,
    cache_dir: Path,
    encoder: Encoder = BYTES,
) -> TokenCorpus:
    """Tokens of `files`, one document a file, sorted by their path relative to `root`.

    Raises:
        ConfigError: E105 where the split has no file, E108 where a file is not text.
    """
    by_path = sorted((file.relative_to(root).as_posix(), file) for file in files)
    if not by_path:
        raise empty_corpus(name, split, f"no text file in {root}")
    selected = [by_path[i] for i in split_indices([path for path, _ in by_path], split)]
    if not selected:
        raise empty_corpus(name, split, f"{root} has only {len(by_path)} file")
    parts = [name, split, str(root.resolve())]
    for path, file in selected:
        status = file.stat()
        parts.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    documents = _reader([file for _, file in selected])
    tokens, ends = cached_documents(cache_dir, cache_key(parts), documents, encoder=encoder)
    return TokenCorpus(name, split, tokens, ends)


def _reader(files: Sequence[Path]) -> Callable[[], Iterator[bytes]]:
    def documents() -> Iterator[bytes]:
        for file in files:
            content = file.read_bytes()
            refuse_binary(file, content)
            yield content

    return documents


def refuse_binary(file: Path, content: bytes) -> None:
    """Raise E108 where `content` holds a zero byte: text has none, and it ends documents here."""
    offset = content.find(0)
    if offset >= 0:
        raise ConfigError(
            "E108",
            f"{file} is not text: it has a zero byte at offset {offset:,}; "
            "move it out of the folder, or name a text file",
        )


def split_indices(keys: Sequence[str], split: Split) -> list[int]:
    """Ascending indices of the documents of `split`, each chosen by a hash of its own key.

    About one in `HELDOUT_DIVISOR` is held out; equal keys share a side. Where chance would leave a side empty
    the key with the smallest hash alone is held out, so that two different keys suffice for both sides.
    """
    if split == "all":
        return list(range(len(keys)))
    hashes = [int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") for key in keys]
    heldout = [value % HELDOUT_DIVISOR == 0 for value in hashes]
    if keys and (all(heldout) or not any(heldout)):
        smallest = min(hashes)
        heldout = [value == smallest and smallest != max(hashes) for value in hashes]
    return [index for index, held in enumerate(heldout) if held == (split == "heldout")]


def hashed_corpus(
    name: str,
    parts: Sequence[str],
    read: Callable[[], Iterator[Any]],
    *,
    split: Split,
    cache_dir: Path,
    encoder: Encoder = BYTES,
) -> TokenCorpus:
    """Tokens of documents that are held out by a hash of their content, so that copies of one share a side.

    Args:
        name: the source as the user wrote it.
        parts: all that the documents follow from, for the cache.
        read: reads the documents, bytes or arrays of ids, from the start; called twice where the cache has no entry.
        split: which of them.
        cache_dir: folder of the flattened ids.
        encoder: makes ids of them.

    Raises:
        ConfigError: E105 where the split has no document.
    """

    def documents() -> Iterator[Any]:
        keys = [hashlib.blake2b(bytes(item), digest_size=8).hexdigest() for item in read()]
        selected = frozenset(split_indices(keys, split))
        return (item for index, item in enumerate(read()) if index in selected)

    tokens, ends = cached_documents(cache_dir, cache_key((*parts, split)), documents, encoder=encoder)
    if not len(ends):
        raise empty_corpus(name, split, "it has no document for it")
    return TokenCorpus(name, split, tokens, ends)


def split_range(count: int, split: Split) -> range:
    """The part of one undivided source of `count` tokens: its trailing 5 % are held out."""
    cut = count - count // HELDOUT_DIVISOR
    return {"train": range(cut), "heldout": range(cut, count), "all": range(count)}[split]


def cache_key(parts: Iterable[str]) -> str:
    """Name of a cache entry: a hash over everything that its content follows from."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (_CACHE_FORMAT, *parts):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def empty_corpus(name: str, split: Split, found: str) -> ConfigError:
    """The E105 of a source that has nothing for `split`."""
    fix = (
        "give a source with more text, or set data.eval to a source of its own"
        if split == "heldout"
        else 'give a source that has text, e.g. data.train = "stdlib" or "text:PATH"'
    )
    return ConfigError("E105", f"data {name!r} is empty for the {split} split: {found}; {fix}")
