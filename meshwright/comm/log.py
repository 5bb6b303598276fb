"""What this rank asked of the network: a mapped ring of the last 256 events, and counters.

Every event is written *before* its call, into a file that outlives the process: after any death (SIGKILL, an
abort inside Gloo) the launcher or a peer reads the rings of all ranks and names who missed what. The counters
answer "how many, how many bytes" without keeping a list. Knows nothing of torch.

Simplification: peers on another host are only comparable when the ring folder is on a shared file system.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RING_SIZE = 256
_MAGIC = b"MWRING01"
# magic, rank, world size, pid, events started, step, wall time of the last progress, what the rank is doing
_HEADER = struct.Struct("<8sIIIQqd64s")
# sequence, started, finished (0 while in flight), ordinal, numel, op, axis, dtype, peers, cause
_RECORD = struct.Struct("<QddQQ16s24s12s40s88s")
_HEADER_BYTES = 256
# Offsets of the header's and a record's changing fields.
_NUM_STARTED, _STEP, _PROGRESSED = 20, 28, 36
_FINISHED = 16
POINT_TO_POINT = frozenset({"send", "receive"})


@dataclass(frozen=True)
class CommEvent:
    """One logical operation on one rank.

    Attributes:
        sequence: number of this event on this rank, from 0.
        ordinal: number of this collective over its axis on this rank, from 0; what ranks of a group compare by.
            Sends and receives have their own counts: their order differs between peers by right.
        op: `all_reduce`, `reduce`, `reduce_scatter`, `all_gather`, `broadcast`, `all_to_all`, `send`, `receive`
            or `barrier`.
        axis: name of the group, e.g. `dp`.
        peers: ranks of the group.
        dtype: element type as torch names it, without `torch.`.
        numel: number of elements of the largest tensor of the call on this rank, or what all groups of the axis
            share where their tensors differ in size.
        cause: who asked and for what, e.g. `gather blocks.3`.
        started: seconds since the epoch.
        finished: the same; 0.0 while in flight.
    """

    sequence: int
    ordinal: int
    op: str
    axis: str
    peers: str
    dtype: str
    numel: int
    cause: str
    started: float
    finished: float

    def describe(self) -> str:
        """One line for people: `all_reduce #12 of 1,000 float32 over dp (reduce bucket 0)`, by ordinal."""
        return f"{self.op} #{self.ordinal:,} of {self.numel:,} {self.dtype} over {self.axis} ({self.cause})"

    def same_call(self, other: CommEvent) -> bool:
        """Whether both ranks asked for the same thing."""
        return (self.op, self.axis, self.dtype, self.numel, self.cause) == (
            other.op,
            other.axis,
            other.dtype,
            other.numel,
            other.cause,
        )


@dataclass(frozen=True)
class RingState:
    """What one rank's ring says, read by another process."""

    rank: int
    world_size: int
    pid: int
    num_started: int
    step: int
    progressed: float
    phase: str
    events: tuple[CommEvent, ...]

    @property
    def last(self) -> CommEvent | None:
        """The newest event, or None."""
        return self.events[-1] if self.events else None


class CommLog:
    """The log of one rank. `start` before the call, `finish` when its result may be used.

    Args:
        rank: this rank.
        world_size: number of ranks.
        path: ring file, created or overwritten; None keeps the ring in anonymous memory.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, path: Path | None = None) -> None:
        self.rank = rank
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.num_started = 0
        self.in_flight: dict[int, float] = {}
        self._digests: dict[str, int] = {}
        self._ordinals: Counter[tuple[str, str]] = Counter()
        size = _HEADER_BYTES + RING_SIZE * _RECORD.size
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.truncate(size)
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), size)
        _HEADER.pack_into(self._map, 0, _MAGIC, rank, world_size, os.getpid(), 0, -1, time.time(), b"start")

    def start(
        self, op: str, axis: str, *, peers: str, dtype: str, numel: int, nbytes: int, cause: str
    ) -> int:
        """Record an operation that is about to be issued; returns its sequence number."""
        sequence, now = self.num_started, time.time()
        offset = _HEADER_BYTES + (sequence % RING_SIZE) * _RECORD.size
        fields = (op.encode(), axis.encode(), dtype.encode(), peers.encode(), cause.encode())
        order = (axis, op if op in POINT_TO_POINT else "")
        _RECORD.pack_into(self._map, offset, sequence, now, 0.0, self._ordinals[order], numel, *fields)
        self._ordinals[order] += 1
        self.num_started += 1
        self.in_flight[sequence] = now
        struct.pack_into("<Q", self._map, _NUM_STARTED, self.num_started)
        struct.pack_into("<d", self._map, _PROGRESSED, now)
        self.calls[op, axis] += 1
        self.bytes[op, axis] += nbytes
        self.must_agree(axis, f"{op} {dtype} {numel} {cause}")
        return sequence

    def must_agree(self, axis: str, line: str) -> None:
        """Fold into the digest of `axis` what its peers must do alike, whether or not it sends anything."""
        self._digests[axis] = zlib.crc32(line.encode(), self._digests.get(axis, 0))

    def finish(self, sequence: int) -> None:
        """Record that the operation's result may be used."""
        now = time.time()
        offset = _HEADER_BYTES + (sequence % RING_SIZE) * _RECORD.size
        if struct.unpack_from("<Q", self._map, offset)[0] == sequence:
            struct.pack_into("<d", self._map, offset + _FINISHED, now)
        self.in_flight.pop(sequence, None)
        struct.pack_into("<d", self._map, _PROGRESSED, now)

    def digest(self, *axes: str) -> int:
        """A 20-bit number that equals that of the peers when all issued the same calls over each of `axes`."""
        together = self._digests.get(axes[0], 0)
        for axis in axes[1:]:
            together = zlib.crc32(self._digests.get(axis, 0).to_bytes(4, "little"), together)
        return together & 0xFFFFF

    def progress(self, phase: str, step: int | None = None) -> None:
        """Tell watchers what this rank does now, e.g. `data`, `forward`, and at which step."""
        if step is not None:
            struct.pack_into("<q", self._map, _STEP, step)
        struct.pack_into("<d64s", self._map, _PROGRESSED, time.time(), phase.encode())

    @property
    def progressed(self) -> float:
        """Seconds since the epoch when this rank last started or finished something or told its phase."""
        return struct.unpack_from("<d", self._map, _PROGRESSED)[0]

    def state(self) -> RingState:
        """What another process would read from the ring now."""
        return _state(self._map)

    def events(self) -> tuple[CommEvent, ...]:
        """The events still in the ring, oldest first."""
        return tuple(_records(self._map))

    def reset_counters(self) -> None:
        """Start counting calls and bytes anew; the ring and the digests go on."""
        self.calls.clear()
        self.bytes.clear()


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _records(buffer: mmap.mmap | bytes) -> Iterator[CommEvent]:
    num_started = _HEADER.unpack_from(buffer, 0)[4]
    for sequence in range(max(0, num_started - RING_SIZE), num_started):
        offset = _HEADER_BYTES + (sequence % RING_SIZE) * _RECORD.size
        stored, started, finished, ordinal, numel, *raw = _RECORD.unpack_from(buffer, offset)
        if stored == sequence and started:
            op, axis, dtype, peers, cause = map(_text, raw)
            yield CommEvent(stored, ordinal, op, axis, peers, dtype, numel, cause, started, finished)


def _state(buffer: mmap.mmap | bytes) -> RingState:
    _, rank, world_size, pid, num_started, step, progressed, phase = _HEADER.unpack_from(buffer, 0)
    events = tuple(_records(buffer))
    return RingState(rank, world_size, pid, num_started, step, progressed, _text(phase), events)


def read_ring(path: Path) -> RingState | None:
    """The state that a rank left in its ring file; None when there is no readable ring."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    if len(raw) < _HEADER_BYTES + RING_SIZE * _RECORD.size or not raw.startswith(_MAGIC):
        return None
    return _state(raw)


def ring_path(folder: Path, rank: int) -> Path:
    """Where rank `rank` keeps its ring under a run's event folder."""
    return folder / f"rank{rank}.ring"
