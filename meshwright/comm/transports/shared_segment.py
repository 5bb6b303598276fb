"""Shared memory of a process, and views of its peers'.

A segment is anonymous memory behind a file descriptor (memfd): it has no name, so nothing is left of it once the last
process that maps it has ended, however it ended, and no limit of /dev/shm applies. A peer of the same user opens it
as /proc/PID/fd/N. Pages that nobody touches cost nothing, so segments are made large and handed out in pieces.

Knows nothing of collectives. Memory of a segment is given back when the last tensor in it is gone, not piece by piece.
"""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshwright.errors import WorkerError

# Segments of an arena are at least this large.
SEGMENT_BYTES = 64 << 20
_PAGE_BYTES = 4096
# Views of peers' tensors that are kept, because making one costs as much as a small operation.
_KEPT_VIEWS = 1024


@dataclass(frozen=True)
class Segment:
    """A mapped segment of this process.

    Attributes:
        memory: the mapping.
        descriptor: under which peers open it.
    """

    memory: mmap.mmap
    descriptor: int


def make_segment(nbytes: int) -> Segment:
    """Zeroed shared memory of this process.

    Raises:
        WorkerError: E407 where the system does not give it.
    """
    try:
        descriptor = os.memfd_create("meshwright", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
            return Segment(mmap.mmap(descriptor, nbytes), descriptor)
        except (OSError, ValueError):
            os.close(descriptor)
            raise
    except (OSError, ValueError, AttributeError) as error:
        raise WorkerError(
            "E407",
            f"no shared memory of {nbytes:,} bytes to be had: {error}. Raise the limits on file size, address space "
            f'and open files (ulimit -f, -v, -n), or set plan.transport="gloo".',
        ) from error


def open_segment(process: int, descriptor: int, nbytes: int) -> mmap.mmap:
    """Map a segment of another process; OSError where that is not allowed or the process is gone."""
    own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(own, nbytes)
    finally:
        os.close(own)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the shared memory of the process that owns it.

    Attributes:
        owner: global rank of that process.
        serial: of the segment; never used again. 0 says that the tensor is not in shared memory.
        descriptor: of the segment.
        nbytes: of the segment.
        offset: of the tensor's first element, in bytes.
    """

    owner: int
    serial: int
    descriptor: int
    nbytes: int
    offset: int


NOWHERE = Place(0, 0, 0, 0, 0)


@dataclass(eq=False)
class _Mapped:
    """A segment in this process's memory, its own or a peer's; `start` is the place of its first byte."""

    start: Place
    address: int
    used: int
    memory: weakref.ref[mmap.mmap]


class Arena:
    """Shared memory of this process that tensors live in, and what is mapped of its peers'.

    Args:
        rank: global rank of this process.

    Attributes:
        freed: number of segments given back so far; peers forget what they have mapped when it changes.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.freed = 0
        self._mapped: tuple[_Mapped, ...] = ()
        self._num_made = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of zeros in shared memory.

        Raises:
            WorkerError: E407.
        """
        if numel == 0:
            return torch.zeros(0, dtype=dtype)
        nbytes = -(-numel * dtype.itemsize // _PAGE_BYTES) * _PAGE_BYTES
        for mapped in self._mapped:
            memory = mapped.memory()
            if memory is not None and mapped.used + nbytes <= mapped.start.nbytes:
                break
        else:
            segment = make_segment(max(nbytes, SEGMENT_BYTES))
            memory, self._num_made = segment.memory, self._num_made + 1
            start = Place(self.rank, self._num_made, segment.descriptor, len(memory), 0)
            mapped = self.register(memory, start, used=0)
        offset, mapped.used = mapped.used, mapped.used + nbytes
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)

    def view(self, place: Place, *, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of this process's own."""
        memory = next(m.memory() for m in self._mapped if m.start == replace(place, offset=0))
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=place.offset)

    def find(self, tensor: Tensor) -> Place:
        """Where `tensor` lies; `NOWHERE` if in no segment."""
        if self._mapped:
            address = tensor.data_ptr()
            for mapped in self._mapped:
                start = mapped.start
                if mapped.address <= address < mapped.address + start.nbytes:
                    return Place(
                        start.owner, start.serial, start.descriptor, start.nbytes, address - mapped.address
                    )
        return NOWHERE

    def register(self, memory: mmap.mmap, start: Place, *, used: int) -> _Mapped:
        """Know tensors in this mapping, as long as there are any; its first `used` bytes are not to be handed out."""
        address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        mapped = _Mapped(start, address, used, weakref.ref(memory))
        self._mapped += (mapped,)
        # Tensors keep the mapping; whatever else lies at its addresses after them must not be taken for theirs.
        weakref.finalize(memory, self._forget, mapped).atexit = False
        return mapped

    def _forget(self, mapped: _Mapped) -> None:
        self._mapped = tuple(other for other in self._mapped if other is not mapped)
        if mapped.start.owner == self.rank:
            self.freed += 1
            os.close(mapped.start.descriptor)


class PeerArena:
    """What this process has mapped of another one's arena.

    Args:
        process: its number.
        arena: of this process, which is to know what is mapped.
    """

    def __init__(self, process: int, arena: Arena) -> None:
        self._process = process
        self._arena = arena
        self._freed = 0
        self._segments: dict[int, mmap.mmap] = {}
        self._views: dict[tuple[int, int, int, torch.dtype], Tensor] = {}

    def view(self, place: Place, freed: int | None, *, numel: int, dtype: torch.dtype) -> Tensor:
        """The peer's tensor at `place`; `freed` is the peer's own count, None if somebody else told the place.

        Raises:
            RuntimeError: the segment cannot be mapped.
        """
        if freed not in (None, self._freed) or len(self._views) > _KEPT_VIEWS:
            self._freed = self._freed if freed is None else freed
            self._views.clear()
            self._segments.clear()
        key = (place.serial, place.offset, numel, dtype)
        view = self._views.get(key)
        if view is None:
            memory = self._mapped(place)
            view = torch.frombuffer(memory, dtype=dtype, count=numel, offset=place.offset)
            self._views[key] = view
        return view

    def _mapped(self, place: Place) -> mmap.mmap:
        if place.serial not in self._segments:
            try:
                memory = open_segment(self._process, place.descriptor, place.nbytes)
            except (OSError, ValueError) as error:
                raise RuntimeError(f"memory of rank {place.owner} cannot be mapped: {error}") from error
            self._arena.register(memory, replace(place, offset=0), used=place.nbytes)
            self._segments[place.serial] = memory
        return self._segments[place.serial]
