"""Foreign weights as a checkpoint from which a run can start: safetensors files; one tensor is in memory at a time.

Owns which files a folder of safetensors consists of, and how a checkpoint is written by one process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint import folder
from meshwright.checkpoint.exporting import INDEX_NAME, make_empty
from meshwright.checkpoint.manifest import Kind, LogicalTensor, Manifest, Part, RunFacts
from meshwright.checkpoint.shardfile import Header, TensorFile, dtype_name, write_tensors
from meshwright.errors import CheckpointError

_FILE_NAME = "rank00000.safetensors"


@dataclass(frozen=True)
class Incoming:
    """A tensor that a checkpoint will hold.

    Attributes:
        kind: what it is.
        name: of the parameter or buffer.
        slot: which optimizer state, else empty.
        dtype: element type.
        shape: of the whole tensor.
        read: gives its values, in this shape.
    """

    kind: Kind
    name: str
    slot: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def import_safetensors(source: Path, out: Path) -> Manifest:
    """Write the tensors of safetensors files as a checkpoint of step 0, without optimizer state.

    Args:
        source: a file, or a folder with `model.safetensors.index.json` or files of its own.
        out: the checkpoint, a folder that does not exist or is empty.

    Raises:
        CheckpointError: E503 no such files, E502 a damaged one, E504 `out` is in use.
    """
    files = [TensorFile(path) for path in _files(source)]
    try:
        found = []
        for file in files:
            for key, stored in file.stored.items():
                kind: Kind = "parameter" if stored.dtype.is_floating_point else "buffer"
                found.append(
                    Incoming(kind, key, "", stored.dtype, stored.shape, _reading(file, key, stored.shape))
                )
        return write_checkpoint(out, found, RunFacts(step=0))
    finally:
        for file in files:
            file.close()


def write_checkpoint(out: Path, tensors: Sequence[Incoming], run: RunFacts) -> Manifest:
    """Write a checkpoint from one process, tensor by tensor; it has its name when it is complete."""
    make_empty(out)
    temporary = out.with_name(f"{out.name}.tmp-import")
    make_empty(temporary)
    headers, logical = [], []
    for tensor in tensors:
        label = "/".join(filter(None, (tensor.kind, tensor.name, tensor.slot)))
        headers.append(Header(label, tensor.dtype, tensor.shape))
        numel = int(torch.Size(tensor.shape).numel())
        parts = (Part(0, label, 0, numel),) if numel else ()
        dtype = dtype_name(tensor.dtype)
        logical.append(LogicalTensor(tensor.kind, tensor.name, tensor.slot, tensor.shape, dtype, parts))

    def values() -> Iterator[Tensor]:
        for tensor in tensors:
            yield tensor.read()

    record = write_tensors(temporary / _FILE_NAME, headers, values())
    manifest = Manifest(run, 1, (record,), tuple(logical), time.time())
    out.rmdir()
    folder.commit(temporary, manifest, final=out)
    return manifest


def _reading(file: TensorFile, key: str, shape: tuple[int, ...]) -> Callable[[], Tensor]:
    def read() -> Tensor:
        stored = file.stored[key]
        out = torch.empty(torch.Size(shape).numel(), dtype=stored.dtype)
        file.read_into(key, out)
        return out.view(shape)

    return read


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    index = source / INDEX_NAME
    if index.is_file():
        try:
            names = dict.fromkeys(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError("E502", f"{index} is damaged: {error}. Copy the folder again.") from error
        return [source / name for name in names]
    found = sorted(source.glob("*.safetensors"))
    if not found:
        raise CheckpointError(
            "E503",
            f"{str(source)!r} has no safetensors files, no {INDEX_NAME}, and is no torch checkpoint (.metadata)",
        )
    return found
