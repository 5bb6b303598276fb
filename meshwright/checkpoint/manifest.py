"""What a checkpoint holds, as plain data and as JSON: every logical tensor, and where its flat intervals lie.

Owns the format of `manifest.json`. Knows nothing of torch, of files' bytes or of how a run uses the tensors. A
tensor is known by (kind, name, slot): parameters and buffers by their name in the model, optimizer state by the
parameter's name and the slot (`exp_avg`), a generator's state by the rank it belongs to.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from meshwright.errors import CheckpointError
from meshwright.layout.stripes import Stripe, wrong_cover

FORMAT = 1
# Of manifests in which parts of several runs occur: an earlier version must not read them.
FORMAT_OF_STRIPES = 2
MANIFEST_NAME = "manifest.json"
Kind = Literal["parameter", "buffer", "optimizer", "generator"]
MODEL_KINDS = ("parameter", "buffer")


@dataclass(frozen=True)
class Part:
    """Flat elements of a logical tensor, as tensor `key` of file number `file`.

    Attributes:
        file: its number.
        key: of the tensor in the file, 1-D.
        start: first element.
        stop: one past the last.
        length: elements of each of several runs, columns of a matrix; 0: all of [start, stop).
        stride: from run to run in the logical tensor.
    """

    file: int
    key: str
    start: int
    stop: int
    length: int = 0
    stride: int = 0

    @property
    def stripe(self) -> Stripe:
        """Its runs; `offset` is in tensor `key`."""
        if not self.length:
            return Stripe(self.start, self.stop - self.start)
        count = (self.stop - self.start - self.length) // self.stride + 1
        return Stripe(self.start, self.length, count, self.stride, 0, self.length)


@dataclass(frozen=True)
class LogicalTensor:
    """A whole tensor, wherever its parts lie.

    Attributes:
        kind: what it is.
        name: of the parameter or buffer in the model; of a generator: its rank.
        slot: which state of an optimizer, else empty.
        shape: of the whole tensor.
        dtype: element type as torch prints it, without `torch.`.
        parts: ascending; together they cover every element once.
    """

    kind: Kind
    name: str
    slot: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        bits = 8 if self.dtype == "bool" else int(re.sub(r"\D", "", self.dtype) or 0)
        return self.numel * bits // 8

    @property
    def label(self) -> str:
        """Name for people: the parameter, and which state of it."""
        return f"{self.name} {self.slot}".rstrip()


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: its name, size, and CRC-32 of all its bytes."""

    name: str
    nbytes: int
    checksum: int


@dataclass(frozen=True)
class RunFacts:
    """What a checkpoint says of the run besides tensors; all of it is JSON.

    Attributes:
        step: finished optimizer steps.
        tokens: counted elements of the loss so far.
        samples: global stream position: samples that all ranks have seen.
        state: further numbers that a step changes, by name.
        seed: of weights, sample order and dropout.
        dropout: `stateless` (nothing to save) or `native` (generator states by rank).
        optimizer: name of the update rule; empty where there is no optimizer state.
        plan: how the run was laid out, as in `plan.lock.json`.
        config: keys of the run file and their values, as far as they decide what is learned.
        numbers: sizes that keys of `model` set, by key; empty where the model is a user's.
        aliases: further names of tied parameters to the name under which they are stored.
    """

    step: int
    tokens: int = 0
    samples: int = 0
    state: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    dropout: str = "stateless"
    optimizer: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but the elements.

    Attributes:
        run: facts of the run.
        world_size: ranks that wrote it.
        files: in the order that `Part.file` counts.
        tensors: every logical tensor.
        written: seconds since the epoch.
    """

    run: RunFacts
    world_size: int
    files: tuple[FileRecord, ...]
    tensors: tuple[LogicalTensor, ...]
    written: float = 0.0

    @cached_property
    def model(self) -> dict[str, LogicalTensor]:
        """Parameters and buffers by name."""
        return {tensor.name: tensor for tensor in self.tensors if tensor.kind in MODEL_KINDS}

    @cached_property
    def optimizer(self) -> dict[str, list[LogicalTensor]]:
        """Optimizer state by the parameter's name."""
        states: dict[str, list[LogicalTensor]] = {}
        for tensor in self.tensors:
            if tensor.kind == "optimizer":
                states.setdefault(tensor.name, []).append(tensor)
        return states

    @cached_property
    def generators(self) -> dict[str, LogicalTensor]:
        """States of random generators by rank and device."""
        return {tensor.name: tensor for tensor in self.tensors if tensor.kind == "generator"}

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that name the model: its tensors' names and shapes, in order of names."""
        return fingerprint((name, tensor.shape) for name, tensor in self.model.items())

    def to_json(self) -> str:
        """The text of `manifest.json`, with a checksum of itself; the inverse of `from_json`."""
        value = asdict(self)
        value["tensors"] = [_tensor_json(tensor) for tensor in self.tensors]
        striped = any(part.length for tensor in self.tensors for part in tensor.parts)
        number = FORMAT_OF_STRIPES if striped else FORMAT
        body = {"format": number, "fingerprint": self.fingerprint, **value}
        return json.dumps({"checksum": _checksum(body), "manifest": body}, indent=0)

    @classmethod
    def from_json(cls, text: str, *, path: str) -> Manifest:
        """Rebuild what `to_json` wrote; `path` is only named in errors.

        Raises:
            CheckpointError: E502 when the text is cut or changed, or of a later format.
        """
        try:
            outer = json.loads(text)
            body = outer["manifest"]
            stated, found = outer["checksum"], _checksum(body)
            if stated != found:
                raise CheckpointError(
                    "E502",
                    f"{path} is damaged: its checksum is {stated:08x}, its content has {found:08x}. {RESTORE}",
                )
            if body["format"] not in (FORMAT, FORMAT_OF_STRIPES):
                raise CheckpointError(
                    "E502",
                    f"{path} has format {body['format']}; this version reads formats 1 to "
                    f"{FORMAT_OF_STRIPES}. Update meshwright.",
                )
            return cls(
                run=RunFacts(**body["run"]),
                world_size=body["world_size"],
                files=tuple(FileRecord(**file) for file in body["files"]),
                tensors=tuple(_tensor_of(tensor) for tensor in body["tensors"]),
                written=body["written"],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                "E502", f"{path} is damaged: {type(error).__name__} {error}. {RESTORE}"
            ) from error


RESTORE = "Take an earlier checkpoint: --resume auto does."


def fingerprint(model: Iterable[tuple[str, Sequence[int]]]) -> str:
    """16 hexadecimal digits of (name, shape) pairs, in any order."""
    text = json.dumps(sorted((name, list(shape)) for name, shape in model))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def merge_notes(
    notes: Sequence[Sequence[Sequence[Any]]], expected: Sequence[tuple[Kind, str, tuple[int, ...]]]
) -> tuple[LogicalTensor, ...]:
    """What each file holds, put together to logical tensors; every element is there once, and nothing is missing.

    Args:
        notes: for each file its tensors as (kind, name, slot, shape, dtype, key, start, stop), and length and
            stride of several runs.
        expected: kind, name and shape of every model tensor.
    """
    found: dict[tuple[Kind, str, str], tuple[tuple[int, ...], str, list[Part]]] = {}
    for number, items in enumerate(notes):
        for kind, name, slot, shape, dtype, key, start, stop, *runs in items:
            entry = found.setdefault((kind, name, slot), (tuple(shape), dtype, []))
            assert entry[:2] == (tuple(shape), dtype), (
                f"{kind} {name} {slot}: ranks saved {entry[:2]} and others"
            )
            if stop > start:
                entry[2].append(Part(number, key, start, stop, *runs))
    for kind, name, shape in expected:
        empty: tuple[tuple[int, ...], str, list[Part]] = (
            shape,
            "float32",
            [],
        )  # no rank owns a part of nothing
        entry = found.setdefault((kind, name, ""), empty)
        assert entry[0] == shape, f"{kind} {name} was saved with shape {entry[0]}, the model has {shape}"
    tensors = []
    for (kind, name, slot), (shape, dtype, parts) in found.items():
        ordered = tuple(sorted(parts, key=lambda part: part.start))
        tensors.append(LogicalTensor(kind, name, slot, shape, dtype, ordered))
        wrong = cover(tensors[-1])
        assert not wrong, f"{kind} {tensors[-1].label}: {wrong}"
    return tuple(tensors)


def cover(tensor: LogicalTensor) -> str:
    """What is wrong with the parts of `tensor`: a gap, an overlap, or nothing (empty text)."""
    return wrong_cover((part.stripe for part in tensor.parts), tensor.numel)


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _tensor_json(tensor: LogicalTensor) -> list[Any]:
    parts = [
        [part.file, part.key, part.start, part.stop, *((part.length, part.stride) if part.length else ())]
        for part in tensor.parts
    ]
    return [tensor.kind, tensor.name, tensor.slot, list(tensor.shape), tensor.dtype, parts]


def _tensor_of(value: Sequence[Any]) -> LogicalTensor:
    kind, name, slot, shape, dtype, parts = value
    return LogicalTensor(kind, name, slot, tuple(shape), dtype, tuple(Part(*part) for part in parts))
