"""Saving: every rank writes its own file, rank 0 commits; at once or behind the back of training.

Owns the host buffers of a save in the background, its thread and the agreement of ranks. That goes by files, because a
thread must not use the training's groups: a rank that has its file on disk leaves a note with size, checksum and what
is in it; rank 0 waits for all notes, checks that every logical tensor is covered once, writes the manifest and renames.
Must not know engines, policies or optimizers: it gets named flat pieces.

Simplification: all ranks see one file system. A failed save ends the run: the checkpoint before it is valid.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint import folder
from meshwright.checkpoint.manifest import FileRecord, Kind, Manifest, RunFacts, merge_notes
from meshwright.checkpoint.shardfile import Header, dtype_name, write_tensors
from meshwright.errors import CheckpointError, SaveError

_POLL_SECONDS = 0.02
# A rank that has not written its file by then has died without anybody noticing.
_COMMIT_SECONDS = 1800.0


@dataclass(frozen=True)
class Item:
    """Flat elements of a logical tensor that this rank writes.

    Attributes:
        kind: what it is.
        name: of the parameter or buffer; of a generator: its rank.
        slot: which optimizer state, else empty.
        shape: of the logical tensor.
        start: first flat element.
        values: 1-D.
        length: elements of each of several runs; 0: they are one.
        stride: from run to run in the logical tensor.
    """

    kind: Kind
    name: str
    slot: str
    shape: tuple[int, ...]
    start: int
    values: Tensor
    length: int = 0
    stride: int = 0

    @property
    def stop(self) -> int:
        """One past the last flat element."""
        if not self.length:
            return self.start + self.values.numel()
        return self.start + (self.values.numel() // self.length - 1) * self.stride + self.length

    def place_of(self, whole: Tensor) -> Tensor:
        """Its elements (1-D, or runs by their number) of the flat whole tensor, which shares its memory."""
        if not self.length:
            return whole[self.start : self.stop]
        shape = (self.values.numel() // self.length, self.length)
        return whole.as_strided(shape, (self.stride, 1), whole.storage_offset() + self.start)

    @property
    def key(self) -> str:
        """Its name in the file."""
        runs = f":{self.length}/{self.stride}" if self.length else ""
        return f"{self.kind}/{self.name}{'/' if self.slot else ''}{self.slot}[{self.start}:{self.stop}{runs}]"


@dataclass(frozen=True)
class SaveReport:
    """What a finished save cost.

    Attributes:
        path: the checkpoint.
        step: its step.
        nbytes: of all ranks' files; 0 on ranks that did not commit.
        stall_seconds: for which training stood still on this rank.
        seconds: from the start of the save to the checkpoint's name.
    """

    path: Path
    step: int
    nbytes: int
    stall_seconds: float
    seconds: float


@dataclass
class _Save:
    """One save under way."""

    path: Path
    run: RunFacts
    started: float
    stall_seconds: float = 0.0
    thread: threading.Thread | None = None
    error: BaseException | None = None
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Place:
    """Where a rank saves, and who it is.

    Attributes:
        folder: of all checkpoints of the run.
        rank: number of this rank.
        world_size: ranks that save.
        attempt: word that all ranks share and no earlier run used.
        keep: newest checkpoints that stay.
    """

    folder: Path
    rank: int
    world_size: int
    attempt: str
    keep: int = 3


@dataclass
class Writer:
    """Saves checkpoints of one rank.

    Args:
        place: where, and who.
        background: copy to host memory and let a thread write; the copy's memory is kept for the next save.
        expected: on rank 0, kind, name and shape of every model tensor that a checkpoint must hold.
        progress: tells watchers that a save is alive.
    """

    place: Place
    background: bool
    expected: Sequence[tuple[Kind, str, tuple[int, ...]]]
    progress: Callable[[], None] = lambda: None
    _num_saves: int = field(default=0, init=False)
    _current: _Save | None = field(default=None, init=False)
    _host: list[Tensor] = field(default_factory=list, init=False)

    def save(self, items: Sequence[Item], run: RunFacts) -> SaveReport | None:
        """Save `items`; what was still being written is finished first, and its report returned.

        In the background this returns when the values are copied, else when the checkpoint is complete.

        Raises:
            SaveError: E504 when this save or the last could not be written.
        """
        started = time.perf_counter()
        last = self.finish()
        self._num_saves += 1  # the same on every rank, so that a failed save leaves nothing to the next one
        path = folder.temporary(self.place.folder, run.step, f"{self.place.attempt}x{self._num_saves}")
        save = _Save(path, run, started)
        headers = [Header(item.key, item.values.dtype, tuple(item.values.shape)) for item in items]
        notes = [_note(item) for item in items]
        values = self._copies(items) if self.background else [item.values for item in items]
        self._current = save

        def work() -> None:
            try:
                self._write(save, headers, notes, values)
            except BaseException as error:
                save.error = error

        if self.background:
            save.thread = threading.Thread(target=work, name="checkpoint", daemon=True)
            save.thread.start()
        else:
            work()
        save.stall_seconds = time.perf_counter() - started
        return last

    @property
    def stall_seconds(self) -> float:
        """For which the newest save stopped training on this rank."""
        return self._current.stall_seconds if self._current else 0.0

    def poll(self) -> SaveReport | None:
        """The report of a save that has been finished since the last call; raises E504 if it failed."""
        save = self._current
        if save is None or (save.thread is not None and save.thread.is_alive()):
            return None
        return self.finish()

    def finish(self) -> SaveReport | None:
        """Wait for the save under way, if any, and report it; raises E504 if it failed."""
        save = self._current
        if save is None:
            return None
        while save.thread is not None and save.thread.is_alive():
            save.thread.join(1.0)
            self.progress()
        self._current = None
        if save.error is not None:
            raise self._failed(save, save.error)
        final = save.path.with_name(folder.step_name(save.run.step))
        return SaveReport(final, save.run.step, save.nbytes, save.stall_seconds, save.seconds)

    def _copies(self, items: Sequence[Item]) -> list[Tensor]:
        """The values in host memory of our own, the same memory at every save as long as sizes stay."""
        fits = [(tensor.numel(), tensor.dtype) for tensor in self._host]
        if fits != [(item.values.numel(), item.values.dtype) for item in items]:
            pinned = any(item.values.is_cuda for item in items)
            self._host = [
                torch.empty(item.values.numel(), dtype=item.values.dtype, pin_memory=pinned) for item in items
            ]
        for host, item in zip(self._host, items, strict=True):
            host.copy_(item.values.detach(), non_blocking=True)
        if any(item.values.is_cuda for item in items):
            torch.cuda.synchronize()
        return self._host

    def _write(
        self, save: _Save, headers: Sequence[Header], notes: Sequence[list[object]], values: Sequence[Tensor]
    ) -> None:
        place = self.place
        save.path.mkdir(parents=True, exist_ok=True)
        try:
            name = f"rank{place.rank:05d}.safetensors"
            record = write_tensors(save.path / name, headers, values, progress=self.progress)
            _leave(
                save.path, place.rank, {"nbytes": record.nbytes, "checksum": record.checksum, "items": notes}
            )
        except BaseException as error:
            _leave_failure(save.path, place.rank, error)
            raise
        if place.rank == 0:
            self._commit(save)
        save.seconds = time.perf_counter() - save.started

    def _commit(self, save: _Save) -> None:
        notes = [self._wait_for(save.path, rank) for rank in range(self.place.world_size)]
        files = tuple(
            FileRecord(f"rank{rank:05d}.safetensors", note["nbytes"], note["checksum"])
            for rank, note in enumerate(notes)
        )
        tensors = merge_notes([note["items"] for note in notes], self.expected)
        manifest = Manifest(save.run, self.place.world_size, files, tensors, time.time())
        for rank in range(self.place.world_size):
            _note_path(save.path, rank).unlink()
        folder.commit(save.path, manifest)
        folder.prune(self.place.folder, keep=self.place.keep)
        save.nbytes = manifest.nbytes

    def _wait_for(self, path: Path, rank: int) -> dict[str, Any]:
        deadline = time.monotonic() + _COMMIT_SECONDS
        while not (note := _note_path(path, rank)).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} has not written its file for {_COMMIT_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
            self.progress()
        value: dict[str, Any] = json.loads(note.read_text())
        if "error" in value:
            raise OSError(f"rank {rank}: {value['error']}")
        return value

    def _failed(self, save: _Save, error: BaseException) -> BaseException:
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            return error
        usage = ""
        if isinstance(error, OSError) and self.place.folder.is_dir():
            stats = os.statvfs(self.place.folder)
            usage = f" ({stats.f_bavail * stats.f_frsize / 2**30:.1f} GiB are free there)"
        left = folder.list_checkpoints(self.place.folder)
        newest = f"The newest valid one is {left[0]}." if left else "There is no earlier one."
        reason = getattr(error, "strerror", None) or str(error)
        return SaveError(
            "E504",
            f"rank {self.place.rank} cannot write the checkpoint of step {save.run.step} to "
            f"{self.place.folder}: {reason}{usage}. {newest} Make room (save.keep is {self.place.keep}) or set "
            f"save.dir, then go on: --resume auto.",
        )


def _note(item: Item) -> list[object]:
    return [
        item.kind,
        item.name,
        item.slot,
        list(item.shape),
        dtype_name(item.values.dtype),
        item.key,
        item.start,
        item.stop,
        *((item.length, item.stride) if item.length else ()),
    ]


def _note_path(path: Path, rank: int) -> Path:
    return path / f"rank{rank:05d}.note"


def _leave(path: Path, rank: int, value: dict[str, object]) -> None:
    """Leave a note that is either whole or not there."""
    note = _note_path(path, rank)
    hidden = note.with_suffix(".part")
    folder.write_text(hidden, json.dumps(value))
    hidden.rename(note)


def _leave_failure(path: Path, rank: int, error: BaseException) -> None:
    try:
        _leave(path, rank, {"error": str(error)})
    except OSError:
        return  # no room even for this: rank 0 is ended with this rank
