"""One rank's file: tensors in the safetensors format, written in one pass and read by flat intervals.

Owns the bytes: a header in JSON, then the elements. The `safetensors` package reads these files too; they are written
here because a rank must stream its tensors (no second copy of them in memory) and take the checksum on the way, and
read here because an interval goes straight into the tensor it belongs to, with every byte counted. Format: README of
github.com/huggingface/safetensors (8 bytes of header length, little endian; JSON; data, offsets relative to its start).
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.folder import CHUNK_BYTES
from meshwright.checkpoint.manifest import RESTORE, FileRecord
from meshwright.errors import CheckpointError

_CODES = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.complex64: "C64",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)
_DTYPES = MappingProxyType({code: dtype for dtype, code in _CODES.items()})
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: element type, shape, and where its bytes begin and end in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    last: int


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` as `float32`.

    Raises:
        CheckpointError: E505 for a type that the file format does not have.
    """
    name = str(dtype).removeprefix("torch.")
    if dtype not in _CODES:
        known = ", ".join(str(item).removeprefix("torch.") for item in _CODES)
        raise CheckpointError("E505", f"elements of type {name} cannot be saved; safetensors has {known}")
    return name


@dataclass(frozen=True)
class Header:
    """What is known of a tensor before its values: key in the file, element type, shape."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path,
    headers: Sequence[Header],
    values: Iterable[Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> FileRecord:
    """Write tensors to the new file `path` and to the disk behind it.

    Args:
        path: the file.
        headers: of all tensors; keys are unique.
        values: in the same order, on any device; each is asked for when its turn comes, and elements that are
            not on the host are copied there chunk by chunk.
        metadata: further texts for the file's header.
        progress: called after every chunk.

    Returns:
        Name, size and checksum of the file.

    Raises:
        OSError: the disk is full, and the like.
        CheckpointError: E505 for an element type that the format does not have.
    """
    start = _header_bytes(headers, metadata or {})
    checksum, nbytes = zlib.crc32(start), len(start)
    with path.open("xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(start))
        for header, tensor in zip(headers, values, strict=True):
            assert (tensor.dtype, tuple(tensor.shape)) == (header.dtype, header.shape), (
                f"{header.key} was announced as {header.dtype} {header.shape}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
            flat = tensor.detach().reshape(-1)
            step = CHUNK_BYTES // header.dtype.itemsize
            for first in range(0, flat.numel(), step):
                raw = raw_bytes(flat[first : first + step].cpu())
                checksum = zlib.crc32(raw, checksum)
                _write_all(file.fileno(), raw)
                nbytes += len(raw)
                progress()
        os.fsync(file.fileno())
    return FileRecord(path.name, nbytes, checksum)


def _header_bytes(headers: Sequence[Header], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for header in headers:
        dtype_name(header.dtype)
        assert header.key not in table, f"two tensors are called {header.key}"
        first, end = end, end + header.nbytes
        code = _CODES[header.dtype]
        table[header.key] = {"dtype": code, "shape": list(header.shape), "data_offsets": [first, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for data at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def raw_bytes(flat: Tensor) -> memoryview:
    """The memory of a contiguous 1-D tensor on the host."""
    data: Any = flat.contiguous().view(torch.uint8).numpy()
    return memoryview(data)


def _write_all(descriptor: int, raw: memoryview) -> None:
    while raw:
        raw = raw[os.write(descriptor, raw) :]


class TensorFile:
    """A safetensors file that is read by flat intervals.

    Attributes:
        stored: key to where the tensor lies.
        metadata: texts of the header.
        bytes_read: bytes of elements read so far.

    Raises:
        CheckpointError: E502 when header and size do not fit together.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise damaged(path, error.strerror or "cannot be opened") from error
        try:
            self.stored, self.metadata = self._read_header()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _read_header(self) -> tuple[dict[str, Stored], dict[str, str]]:
        size = os.fstat(self._descriptor).st_size
        start = os.pread(self._descriptor, 8, 0)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size or length > _MAX_HEADER_BYTES:
            raise damaged(self.path, f"its header should have {length:,} bytes, the file has {size:,}")
        try:
            table = json.loads(os.pread(self._descriptor, length, 8))
            metadata = table.pop("__metadata__", {})
            stored = {key: _stored(entry, 8 + length) for key, entry in table.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(self.path, f"its header cannot be read: {error}") from error
        end = max((entry.last for entry in stored.values()), default=8 + length)
        if end != size:
            raise damaged(self.path, f"it should have {end:,} bytes and has {size:,}")
        return stored, metadata

    def read_into(self, key: str, out: Tensor, *, start: int = 0) -> None:
        """Read flat elements [start, start + out.numel()) of tensor `key` into the 1-D tensor `out`.

        `out` may have another element type, or lie on another device: values are converted chunk by chunk.

        Raises:
            CheckpointError: E502 when there is no such tensor, or too few elements.
        """
        entry = self.stored.get(key)
        if entry is None:
            raise damaged(self.path, f"it holds no tensor {key!r}")
        first = entry.first + start * entry.dtype.itemsize
        if first + out.numel() * entry.dtype.itemsize > entry.last:
            raise damaged(self.path, f"tensor {key!r} has too few elements")
        if out.dtype == entry.dtype and out.device.type == "cpu" and out.is_contiguous():
            self._pread(raw_bytes(out), first)
            return
        step = CHUNK_BYTES // entry.dtype.itemsize
        for begin in range(0, out.numel(), step):
            target = out[begin : begin + step]
            chunk = torch.empty(target.numel(), dtype=entry.dtype)
            self._pread(raw_bytes(chunk), first + begin * entry.dtype.itemsize)
            target.copy_(chunk)

    def _pread(self, raw: memoryview, position: int) -> None:
        while raw:
            count = os.preadv(self._descriptor, [raw], position)
            if count == 0:
                raise damaged(self.path, "it ends too early")
            self.bytes_read += count
            raw, position = raw[count:], position + count


def _stored(entry: Mapping[str, Any], data: int) -> Stored:
    first, last = entry["data_offsets"]
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    if last - first != math.prod(shape) * dtype.itemsize or first < 0:
        raise ValueError(f"{shape} {dtype} does not fit into bytes {first} to {last}")
    return Stored(dtype, shape, data + first, data + last)


def damaged(path: Path, what: str) -> CheckpointError:
    """E502 of one file."""
    return CheckpointError("E502", f"{path} is damaged: {what}. {RESTORE}")
