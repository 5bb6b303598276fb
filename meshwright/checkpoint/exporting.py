"""A checkpoint's weights as safetensors in the layout of the Hugging Face hub: files of limited size and an index.

Owns the layout. One tensor is in memory at a time. Names stay those of the model, tied tensors are stored once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint import folder
from meshwright.checkpoint.manifest import LogicalTensor
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.shardfile import Header, write_tensors
from meshwright.errors import CheckpointError

# What the hub's own tools write: some file systems and servers dislike larger files.
MAX_FILE_BYTES = 5 * 10**9
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        files: names of the files with tensors.
        num_tensors: in all of them.
        nbytes: of all elements.
    """

    files: tuple[str, ...]
    num_tensors: int
    nbytes: int


def export_safetensors(
    reader: CheckpointReader,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Exported:
    """Write parameters and buffers to `model.safetensors`, or to several files with an index.

    Args:
        reader: the checkpoint.
        out: a folder that does not exist, or is empty.
        dtype: element type of floating-point tensors; None: as they are.
        max_file_bytes: larger models are cut into several files.

    Raises:
        CheckpointError: E504 where `out` is in use, E502 where the checkpoint is damaged.
    """
    make_empty(out)
    tensors = list(reader.manifest.model.values())
    groups = _groups([(tensor, _header(tensor, dtype)) for tensor in tensors], max_file_bytes)
    names = [
        SINGLE_NAME if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        for number in range(1, len(groups) + 1)
    ]
    weight_map: dict[str, str] = {}
    for name, group in zip(names, groups, strict=True):
        headers = [header for _, header in group]
        write_tensors(out / name, headers, _values(reader, group), metadata={"format": "pt"})
        weight_map |= {header.key: name for header in headers}
    nbytes = sum(header.nbytes for group in groups for _, header in group)
    if len(groups) > 1:
        index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
        folder.write_text(out / INDEX_NAME, json.dumps(index, indent=2))
    return Exported(tuple(names), len(tensors), nbytes)


def make_empty(out: Path) -> None:
    """Make a folder for new files; E504 where it has some already."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        used = any(out.iterdir())
    except OSError as error:
        raise CheckpointError("E504", f"cannot write to {str(out)!r}: {error.strerror}") from error
    if used:
        raise CheckpointError(
            "E504", f"{str(out)!r} is not empty, and nothing is overwritten; give a new folder"
        )


def _header(tensor: LogicalTensor, dtype: torch.dtype | None) -> Header:
    own: torch.dtype = getattr(torch, tensor.dtype)
    return Header(tensor.name, dtype if dtype and own.is_floating_point else own, tensor.shape)


def _groups(
    tensors: Sequence[tuple[LogicalTensor, Header]], max_bytes: int
) -> list[list[tuple[LogicalTensor, Header]]]:
    groups: list[list[tuple[LogicalTensor, Header]]] = [[]]
    size = 0
    for tensor, header in tensors:
        if groups[-1] and size + header.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append((tensor, header))
        size += header.nbytes
    return groups


def _values(reader: CheckpointReader, group: Sequence[tuple[LogicalTensor, Header]]) -> Iterator[Tensor]:
    for tensor, header in group:
        out = torch.empty(tensor.numel, dtype=header.dtype)
        reader.read_into(tensor, out)
        yield out.view(tensor.shape)
