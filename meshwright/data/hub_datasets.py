"""Hugging Face data sets that lie on this machine: saved folders, folders of files, snapshots and the cache.

Owns finding one table of rows. Must not know what rows are used for. Nothing is downloaded. Rows stay in their
memory-mapped Arrow files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.data.corpus import hashed_corpus
from meshwright.data.identity import Split
from meshwright.data.readers import file_parts
from meshwright.data.tables import documents_of, find_column
from meshwright.data.tokenizer import BYTES, IdEncoder, TextEncoder
from meshwright.data.tokens import TokenCorpus
from meshwright.errors import ConfigError

_SPEC = re.compile(r"(?P<place>[^#@]+?)(?::(?P<name>[\w.-]+))?(?:@(?P<split>[\w.-]+))?(?:#(?P<column>.+))?")
_BATCH_ROWS = 1024


def open_table(spec: str) -> tuple[Any, str | None]:
    """The rows that `hf:SPEC` names, and the column that it names.

    Args:
        spec: `PATH_OR_ID`, then `:CONFIG`, `@SPLIT` (default `train`, or the only one) and `#COLUMN` where wanted.

    Returns:
        A `datasets.Dataset`, and the column or None.

    Raises:
        ConfigError: E105 where nothing is there, E108 where it cannot be read, E115 without the package.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ConfigError(
            "E108", f"data 'hf:{spec}': write hf:PATH_OR_ID, and :CONFIG @SPLIT #COLUMN where wanted"
        )
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "E115", 'data "hf:" needs datasets, which is not installed: pip install "meshwright[hf]"'
        ) from error
    place, name = match["place"], match["name"]
    try:
        found = _load(datasets, place, name)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(
            "E108", f"data 'hf:{spec}' cannot be read: {' '.join(str(error).split())[:300]}"
        ) from error
    if found is None:
        raise ConfigError(
            "E105",
            f"data 'hf:{spec}': {place} is no folder and not in the local cache; nothing is downloaded by itself. "
            f"Fetch it: hf download --repo-type dataset {place}",
        )
    if isinstance(found, datasets.Dataset):
        return found, match["column"]
    wanted = match["split"] or ("train" if "train" in found else next(iter(found)))
    if wanted not in found:
        raise ConfigError("E105", f"data 'hf:{spec}' has no split {wanted!r}; it has {', '.join(found)}")
    return found[wanted], match["column"]


def _load(datasets: Any, place: str, name: str | None) -> Any:
    path = Path(place).expanduser()
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return datasets.load_from_disk(str(path))
    if path.is_dir():
        return datasets.load_dataset(str(path), name)
    if place.startswith((".", "/", "~")) or place.count("/") > 1:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return datasets.load_dataset(
            snapshot_download(place, repo_type="dataset", local_files_only=True), name
        )
    except LocalEntryNotFoundError:
        return _from_cache(datasets, place, name)


def _from_cache(datasets: Any, place: str, name: str | None) -> Any:
    """What `load_dataset` prepared before; its own class for that, so that it never asks the network."""
    from datasets.packaged_modules.cache.cache import Cache

    root = Path(datasets.config.HF_DATASETS_CACHE) / place.replace("/", "___")
    if not root.is_dir():
        return None
    builder = Cache(
        repo_id=place, dataset_name=place.rpartition("/")[2], config_name=name, version="auto", hash="auto"
    )
    return builder.as_dataset()


def hub_corpus(spec: str, *, split: Split, cache_dir: Path, encoder: TextEncoder = BYTES) -> TokenCorpus:
    """The documents of a data set's column of text or ids, flattened once into the cache.

    Args:
        spec: see `open_table`; without `#COLUMN`: `text`, or else `input_ids` or `tokens`.
        split: documents are held out by a hash of their content.
        cache_dir: folder of the flattened ids.
        encoder: makes ids of text.

    Raises:
        ConfigError: as `open_table`; E108 where the column cannot be used.
    """
    table, wanted = open_table(spec)
    name = f"hf:{spec}"
    column, is_text = find_column(table.data.schema, wanted, place=f"data {name!r}", prefix="hf:PATH_OR_ID")
    return hashed_corpus(
        name,
        ["hf", column, *(part for file in table.cache_files for part in file_parts(Path(file["filename"])))],
        partial(_documents, table, column),
        split=split,
        cache_dir=cache_dir,
        encoder=encoder if is_text else IdEncoder(),
    )


def _documents(table: Any, column: str) -> Iterator[Any]:
    rows = table.select_columns([column]).with_format("arrow")
    for batch in rows.iter(batch_size=_BATCH_ROWS):
        for chunk in batch.column(0).chunks:
            yield from documents_of(chunk)
