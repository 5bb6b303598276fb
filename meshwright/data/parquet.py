"""Parquet: a column of text, or of lists of token ids, one document a row.

Owns how rows become documents. Must not know sequences, batches or torch. Row groups are read one after the other and
flattened once into the cache, which is memory-mapped: read from parquet itself, a random order of samples would decode
a whole row group for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.data.corpus import hashed_corpus
from meshwright.data.identity import Split
from meshwright.data.readers import file_parts, missing
from meshwright.data.tables import documents_of, find_column
from meshwright.data.tokenizer import BYTES, IdEncoder, TextEncoder
from meshwright.data.tokens import TokenCorpus
from meshwright.errors import ConfigError

_BATCH_ROWS = 1024


def parquet_corpus(
    path: Path, *, column: str | None = None, split: Split, cache_dir: Path, encoder: TextEncoder = BYTES
) -> TokenCorpus:
    """The documents of a file, or of all `.parquet` files of a folder in the order of their paths.

    Args:
        path: file or folder.
        column: of strings or of lists of integers; None: `text`, or else `input_ids` or `tokens`.
        split: documents are held out by a hash of their content.
        cache_dir: folder of the flattened ids.
        encoder: makes ids of strings.

    Raises:
        ConfigError: E105 where nothing is there, E108 where a file or its column cannot be used, E115 without pyarrow.
    """
    name = f"parquet:{path}"
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not path.exists() or not files:
        raise missing(name, path if not path.exists() else path / "*.parquet")
    found, is_text = find_column(_schema(files[0]), column, place=str(files[0]), prefix="parquet:PATH")
    parts = ["parquet", found, *(part for file in files for part in file_parts(file))]
    return hashed_corpus(
        name,
        parts,
        partial(_documents, files, found),
        split=split,
        cache_dir=cache_dir,
        encoder=encoder if is_text else IdEncoder(),
    )


def _schema(path: Path) -> Any:
    with _open(path) as file:
        return file.schema_arrow


def _documents(files: list[Path], column: str) -> Iterator[Any]:
    for path in files:
        with _open(path) as file:
            if column not in file.schema_arrow.names:
                raise ConfigError(
                    "E108",
                    f"{path} has no column {column!r}, which the first file has; it has {file.schema_arrow.names}",
                )
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[column]):
                yield from documents_of(batch.column(0))


def _open(path: Path) -> Any:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError(
            "E115", 'data "parquet:" needs pyarrow, which is not installed: pip install "meshwright[hf]"'
        ) from error
    try:
        return ParquetFile(path)
    except (ArrowInvalid, OSError) as error:
        raise ConfigError("E108", f"{path} is no parquet file that can be read: {error}") from error
