"""From documents to token ids: text as bytes or by a `tokenizer.json`, and ids that come as they are.

Owns encoders: what they make of a document, what they put between two, and what names a cache of their output. Must not
know where documents come from, nor torch.
Source of the file format: the `tokenizers` library, whose `Tokenizer.from_file` reads it.
Simplification: the separator of a `tokenizer.json` is the end token that its neighbour `tokenizer_config.json` names,
or else the first of the usual names that it knows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.hub import local_folder
from meshwright.errors import ConfigError

BYTE_VOCABULARY = 256
# Ends every document of bytes: text has no zero byte.
BYTE_SEPARATOR = 0
_FILE = "tokenizer.json"
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_MASK_TOKENS = ("[MASK]", "<mask>")
_BATCH_DOCUMENTS = 256


@dataclass(frozen=True)
class ByteEncoder:
    """A document's bytes are its ids.

    Attributes (of every encoder):
        key: names its output in a cache; empty for bytes.
        dtype: of the ids, little-endian.
        separator: id after each document, or None.
        vocab_size: number of ids, or None where only the data knows.
        mask: id that stands for a hidden token, or None.
    """

    key: str = ""
    dtype: str = "u1"
    separator: int | None = BYTE_SEPARATOR
    vocab_size: int | None = BYTE_VOCABULARY
    # The first id that is no byte.
    mask: int | None = BYTE_VOCABULARY

    def encode(self, documents: Iterable[bytes]) -> Iterator[npt.NDArray[Any]]:
        """Views of the documents."""
        for document in documents:
            yield np.frombuffer(document, dtype=np.uint8)

    def encode_whole(self, text: str, limit: int) -> list[int]:
        """Ids of one text, at most `limit`."""
        return list(text.encode()[:limit])


BYTES = ByteEncoder()


@dataclass(frozen=True)
class IdEncoder:
    """Documents that are ids already, of any integer type; what ends them is in them."""

    key: str = "ids"
    dtype: str = "<u4"
    separator: int | None = None
    vocab_size: int | None = None
    mask: int | None = None

    def encode(self, documents: Iterable[npt.NDArray[Any]]) -> Iterator[npt.NDArray[Any]]:
        """The ids in 32 bits.

        Raises:
            ConfigError: E103 for a negative id.
        """
        for document in documents:
            if len(document) and int(document.min()) < 0:
                raise ConfigError("E103", f"a document holds the id {int(document.min())}; ids start at 0")
            yield document.astype(self.dtype)


@dataclass(frozen=True)
class FileEncoder:
    """Text by a `tokenizer.json`.

    Attributes:
        path: of the file.
        key: hash of its content.
    """

    path: Path
    key: str
    dtype: str
    separator: int | None
    vocab_size: int
    mask: int | None
    _tokenizer: Any = field(repr=False, compare=False)

    def encode(self, documents: Iterable[bytes]) -> Iterator[npt.NDArray[Any]]:
        """Ids without the tokens that a template would add around them; bytes that are no UTF-8 become U+FFFD."""
        rest = iter(documents)
        while batch := [
            document.decode("utf-8", errors="replace") for document in islice(rest, _BATCH_DOCUMENTS)
        ]:
            for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield np.asarray(encoding.ids, dtype=self.dtype)

    def encode_whole(self, text: str, limit: int) -> list[int]:
        """Ids of one text with the tokens that the template puts around it, at most `limit`; the last one stays."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]]


TextEncoder = ByteEncoder | FileEncoder
Encoder = TextEncoder | IdEncoder


def open_tokenizer(spec: str) -> TextEncoder:
    """The encoder that `data.tokenizer` names.

    Args:
        spec: `byte`, a path of a `tokenizer.json` or of a folder with one, or `hf:ID` of the local cache.

    Raises:
        ConfigError: E122 where the file is not there, cannot be read or names no end of a document; E115 where the
            package is not installed.
    """
    if spec == "byte":
        return BYTES
    path = _find(spec)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            "E115",
            f'data.tokenizer = "{spec}" needs tokenizers, which is not installed: pip install tokenizers',
        ) from error
    content = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises Exception itself
        raise ConfigError("E122", f"{path} is no tokenizer.json that can be read: {error}") from error
    vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    return FileEncoder(
        path=path,
        key=hashlib.blake2b(content, digest_size=16).hexdigest(),
        dtype="<u2" if vocab_size <= 1 << 16 else "<u4",
        separator=_separator(tokenizer, path),
        vocab_size=vocab_size,
        mask=_first(tokenizer, _MASK_TOKENS),
        _tokenizer=tokenizer,
    )


def _find(spec: str) -> Path:
    place = spec.removeprefix("hf:")
    path = Path(place).expanduser()
    if path.is_file():
        return path
    folder = local_folder(place, _FILE) if spec.startswith("hf:") or path.is_dir() else None
    if folder is not None:
        return folder / _FILE
    fetch = f" Fetch it: hf download {place}" if spec.startswith("hf:") else ""
    raise ConfigError(
        "E122",
        f'data.tokenizer = "{spec}": {path.absolute() if not fetch else place} has no {_FILE} here.{fetch or ""} '
        f'Write "byte", a path of a tokenizer.json, or hf:ID of one in the local cache.',
    )


def _separator(tokenizer: Any, path: Path) -> int:
    names: tuple[str, ...] = _END_TOKENS
    neighbour = path.with_name("tokenizer_config.json")
    if neighbour.is_file():
        settings = json.loads(neighbour.read_text())
        named = settings.get("eos_token") or settings.get("sep_token")
        if named:
            names = (named["content"] if isinstance(named, dict) else named, *names)
    found = _first(tokenizer, names)
    if found is None:
        raise ConfigError(
            "E122",
            f"{path} has none of the tokens that end a document ({', '.join(_END_TOKENS)}); add one, or name it as "
            f'"eos_token" in a tokenizer_config.json beside it',
        )
    return found


def _first(tokenizer: Any, names: tuple[str, ...]) -> int | None:
    ids = (tokenizer.token_to_id(name) for name in names)
    return next((token for token in ids if token is not None), None)
