"""To and from torch's distributed checkpoints (DCP): the one place here that imports torch.distributed, without groups.

Keys are those of common trainers: `model.NAME`, `optim.state.NAME.SLOT`; `train.step` and the like are tensors. One
tensor is in memory at a time, both ways. DCP's `.metadata` is a pickle: it is read by an unpickler that knows the few
classes such a file is made of and no other, so a crafted one raises E502 and runs nothing; tensors are read with
`weights_only`. Entries that are pickled objects (`BytesStorageMetadata`) are left out.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from meshwright.checkpoint.exporting import Exported, make_empty
from meshwright.checkpoint.importing import Incoming, write_checkpoint
from meshwright.checkpoint.manifest import LogicalTensor, Manifest, RunFacts
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.errors import CheckpointError

METADATA_NAME = ".metadata"
_FACTS = ("step", "tokens", "samples")
_TRAIN = "train."
_MODEL, _OPTIMIZER = "model.", "optim.state."
_MODULES = "torch.distributed.checkpoint"
# All that a `.metadata` file is made of: values without behaviour.
_KNOWN = MappingProxyType(
    {
        f"{_MODULES}.metadata": {
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        },
        f"{_MODULES}.filesystem": {"_StorageInfo"},
        "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
        "torch.serialization": {"_get_layout"},
        "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath"},
        "collections": {"OrderedDict"},
    }
)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no such file needs")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """torch's reader without its pickle, and with the metadata read once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata = _read_metadata(path / METADATA_NAME)

    def read_metadata(self, *_args: Any, **_given: Any) -> Metadata:
        """What the restricted unpickler found."""
        return self._metadata


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError) as error:
        raise CheckpointError(
            "E502",
            f"{path} cannot be read as a torch distributed checkpoint: {error}. Nothing in it was run.",
        ) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError("E502", f"{path} holds a {type(metadata).__name__}, not a Metadata")
    return metadata


class _Planner(DefaultSavePlanner):
    """Announces tensors without memory, and reads each when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._read = read

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The values of one item."""
        return self._read(write_item.index.fqn)


def export_dcp(reader: CheckpointReader, out: Path) -> Exported:
    """Write a checkpoint, optimizer state included, as a torch distributed checkpoint.

    Args:
        reader: the checkpoint.
        out: a folder that does not exist, or is empty.

    Raises:
        CheckpointError: E504 where `out` is in use, E502 where the checkpoint is damaged.
    """
    make_empty(out)
    tensors = {_key(tensor): tensor for tensor in reader.manifest.tensors if tensor.kind != "generator"}
    facts = {f"{_TRAIN}{name}": torch.tensor(int(getattr(reader.manifest.run, name))) for name in _FACTS}

    def read(key: str) -> Tensor:
        return facts[key] if key in facts else reader.read(tensors[key])

    announced = {
        key: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
        for key, tensor in tensors.items()
    }
    announced |= {key: torch.empty((), dtype=torch.int64, device="meta") for key in facts}
    with _one_process():
        dcp.save(
            announced,
            storage_writer=FileSystemWriter(out, thread_count=1),
            planner=_Planner(read),
            no_dist=True,
        )
    files = tuple(sorted(path.name for path in out.iterdir()))
    nbytes = sum(t.numel * getattr(torch, t.dtype).itemsize for t in tensors.values())
    return Exported(files, len(tensors), nbytes)


def _key(tensor: LogicalTensor) -> str:
    if tensor.kind == "optimizer":
        return f"{_OPTIMIZER}{tensor.name}.{tensor.slot}"
    return f"{_MODEL}{tensor.name}"


def import_dcp(source: Path, out: Path, *, optimizer: str = "") -> Manifest:
    """Write the tensors of a torch distributed checkpoint as a checkpoint.

    Args:
        source: a folder with `.metadata`. Keys may begin with `model.`; without any, all are taken for the model's.
        out: the checkpoint, a folder that does not exist or is empty.
        optimizer: update rule of `optim.state.NAME.SLOT`; empty: the weights alone, as a new start.

    Raises:
        CheckpointError: E502 a damaged or crafted file, E504 `out` is in use.
    """
    reader = _Reader(source)
    stored = {
        key: entry
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    prefix = _MODEL if any(key.startswith(_MODEL) for key in stored) else ""

    def read(key: str) -> Tensor:
        entry = stored[key]
        out = torch.empty(entry.size, dtype=entry.properties.dtype)
        with _one_process():
            dcp.load({key: out}, storage_reader=reader, no_dist=True)
        return out

    incoming = []
    for key, entry in stored.items():
        is_state = key.startswith(_OPTIMIZER)
        if key.startswith(_TRAIN) or (not optimizer if is_state else not key.startswith(prefix)):
            continue
        name, _, slot = (
            key.removeprefix(_OPTIMIZER).rpartition(".") if is_state else (key.removeprefix(prefix), "", "")
        )
        dtype = entry.properties.dtype
        kind: Any = "optimizer" if is_state else "parameter" if dtype.is_floating_point else "buffer"
        incoming.append(Incoming(kind, name, slot, dtype, tuple(entry.size), partial(read, key)))
    step, tokens, samples = (_number(read, stored, name) if optimizer else 0 for name in _FACTS)
    run = RunFacts(step=step, tokens=tokens, samples=samples, optimizer=optimizer)
    return write_checkpoint(out, incoming, run)


def _number(read: Callable[[str], Tensor], stored: Mapping[str, object], name: str) -> int:
    return int(read(f"{_TRAIN}{name}")) if f"{_TRAIN}{name}" in stored else 0


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Without torch's warning that there is no process group: there is none on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
