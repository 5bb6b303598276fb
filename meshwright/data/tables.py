"""Columns of Arrow tables as documents: strings as UTF-8, lists of integers as ids.

Owns which column is taken and how its values become documents; parquet files and Hugging Face data sets share it. Must
not know files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from meshwright.errors import ConfigError

_USUAL = ("text", "input_ids", "tokens")


def find_column(schema: Any, wanted: str | None, *, place: str, prefix: str) -> tuple[str, bool]:
    """Name of the column of documents, and whether it holds text (else ids).

    Args:
        schema: Arrow schema of the table.
        wanted: the user's choice, or None for a usual name.
        place: file or data set, for messages.
        prefix: how the user names a column, without `#COLUMN`.

    Raises:
        ConfigError: E108 where there is no such column, or it holds neither strings nor lists of integers.
    """
    import pyarrow.types as kinds

    def kind_of(name: str) -> bool | None:
        kind = schema.field(name).type
        if kinds.is_string(kind) or kinds.is_large_string(kind):
            return True
        is_list = kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)
        return False if is_list and kinds.is_integer(kind.value_type) else None

    usable = [name for name in schema.names if kind_of(name) is not None]
    choices: Sequence[str] = _USUAL if wanted is None else (wanted,)
    for name in choices:
        if name in usable:
            return name, kind_of(name) is True
    asked = f"column {wanted!r}" if wanted is not None else f"a column {', '.join(_USUAL)}"
    hint = (
        f"documents can be in {', '.join(usable)}: name one as {prefix}#COLUMN"
        if usable
        else "no column can be read"
    )
    raise ConfigError("E108", f"{place} has not {asked} with text or ids ({hint})")


def documents_of(column: Any) -> Iterator[Any]:
    """The rows of one Arrow array: bytes for strings, int64 arrays for lists; empty rows and nulls are left out."""
    import pyarrow.types as kinds

    if kinds.is_string(column.type) or kinds.is_large_string(column.type):
        for text in column.to_pylist():
            if text:
                yield text.encode("utf-8", errors="surrogatepass")
        return
    for row in column:
        if row.is_valid and len(row):
            yield np.asarray(row.values.to_numpy(zero_copy_only=False), dtype=np.int64)
