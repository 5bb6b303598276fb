"""Readers of users' files: plain text, JSON lines, and flat arrays of token ids as nanoGPT writes them.

Owns the formats and their errors. Must not know sequences, batches or torch.

Simplifications: a text file given alone is mapped as it is and has no documents; of text only the absence of
zero bytes is checked, so that another encoding than UTF-8 trains too, as the bytes that it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from meshwright.data.corpus import (
    cache_key,
    empty_corpus,
    folder_corpus,
    hashed_corpus,
    refuse_binary,
    split_range,
)
from meshwright.data.identity import Split
from meshwright.data.tokenizer import BYTES, TextEncoder
from meshwright.data.tokens import TokenCorpus, TokenFile, cached_documents
from meshwright.errors import ConfigError

_PROBE_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 20


def text_corpus(path: Path, *, split: Split, cache_dir: Path, encoder: TextEncoder = BYTES) -> TokenCorpus:
    """UTF-8 text: a folder's files as documents, or one file, whose last 5 % are held out.

    A folder is read with its subfolders; names that start with a dot are left out. One file is mapped as it is where
    its bytes are the tokens, else it is encoded in blocks of whole lines.

    Raises:
        ConfigError: E105 where nothing is there, E108 where a file is not text.
    """
    name = f"text:{path}"
    if path.is_dir():
        files = list(_visible_files(path))
        return folder_corpus(name, path, files, split=split, cache_dir=cache_dir, encoder=encoder)
    if not path.is_file():
        raise missing(name, path)
    with path.open("rb") as file:
        refuse_binary(path, file.read(_PROBE_BYTES))
    if not encoder.key:
        return _undivided(name, TokenFile(path, np.uint8), split)
    parts = ["text", *file_parts(path)]
    blocks = replace(encoder, separator=None)
    tokens, _ = cached_documents(cache_dir, cache_key(parts), partial(_line_blocks, path), encoder=blocks)
    return _undivided(name, tokens, split)


def _line_blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block + file.readline()


def file_parts(path: Path) -> list[str]:
    """What stands for a file's content in the key of a cache."""
    status = path.stat()
    return [str(path.resolve()), str(status.st_size), str(status.st_mtime_ns)]


def _visible_files(root: Path) -> Iterator[Path]:
    for folder, folder_names, file_names in os.walk(root):
        folder_names[:] = [name for name in folder_names if not name.startswith(".")]
        for name in file_names:
            if not name.startswith(".") and Path(folder, name).is_file():
                yield Path(folder, name)


def nanogpt_corpus(path: Path, *, split: Split) -> TokenCorpus:
    """A flat file of little-endian uint16 ids without header, mapped as it is; its last 5 % are held out.

    Raises:
        ConfigError: E105 where nothing is there, E108 where the size is odd.
    """
    name = f"nanogpt:{path}"
    if not path.is_file():
        raise missing(name, path)
    return _undivided(name, TokenFile(path, "<u2"), split)


def _undivided(name: str, tokens: TokenFile, split: Split) -> TokenCorpus:
    part = split_range(len(tokens), split)
    if not part:
        raise empty_corpus(name, split, f"{tokens.path} holds {len(tokens)} tokens")
    return TokenCorpus(name, split, tokens.part(part.start, part.stop))


def jsonl_corpus(
    path: Path, *, key: str = "text", split: Split, cache_dir: Path, encoder: TextEncoder = BYTES
) -> TokenCorpus:
    """One JSON object a line; the string under `key` is a document.

    Documents are held out by a hash of their text, so that copies of one document share a side.

    Raises:
        ConfigError: E105 where nothing is there, E108 with file and line where a line cannot be used.
    """
    name = f"jsonl:{path}"
    if not path.is_file():
        raise missing(name, path)

    return hashed_corpus(
        name,
        ["jsonl", key, *file_parts(path)],
        partial(_json_documents, path, key),
        split=split,
        cache_dir=cache_dir,
        encoder=encoder,
    )


def _json_documents(path: Path, key: str) -> Iterator[bytes]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                text = _json_text(line, key, where=f"{path}:{number}")
                if text:
                    yield text.encode("utf-8", errors="surrogatepass")


def _json_text(line: bytes, key: str, *, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            "E108", f"not a JSON line ({error}); write one JSON object a line", where=where
        ) from error
    if not isinstance(record, dict):
        raise ConfigError(
            "E108", f"a JSON {type(record).__name__}; write an object such as {{{key!r}: ...}}", where=where
        )
    text = record.get(key)
    if not isinstance(text, str):
        strings = sorted(name for name, value in record.items() if isinstance(value, str))
        choice = f"text is under {', '.join(map(repr, strings))}" if strings else "no key holds text"
        raise ConfigError(
            "E108", f"key {key!r} holds no text; {choice}: name it as jsonl:PATH#KEY", where=where
        )
    return text


def missing(name: str, path: Path) -> ConfigError:
    """The E105 of a path that is not there."""
    return ConfigError(
        "E105", f'data {name!r}: {path.absolute()} does not exist; give a path that does, or use "stdlib"'
    )
