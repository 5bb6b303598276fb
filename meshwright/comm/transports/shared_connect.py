"""Whether ranks can share memory, and how they come to.

Owns what a group says to each other before its first operation: where its ranks run, and the descriptors of their
segments. They agree by what all have said, so either every rank of a group shares memory or none does.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm.transports.shared import SharedTransport
from meshwright.comm.transports.shared_barrier import FIRST_MESSAGE_WORD, Barrier, Peer, start_of
from meshwright.comm.transports.shared_messages import (
    NUM_PIECES,
    PIECE_BYTES,
    Link,
    MessageProgress,
    Messages,
    message_words,
    taken_word,
    written_word,
)
from meshwright.comm.transports.shared_segment import Arena, PeerArena, Segment, make_segment, open_segment
from meshwright.comm.transports.shared_slots import ALL_SLOTS_BYTES, Neighbour
from meshwright.errors import WorkerError

_PAGE_BYTES = 4096


class SharedHost:
    """What all groups of this process have in common: memory for tensors, and messages that move while it waits."""

    def __init__(self, rank: int) -> None:
        self.arena = Arena(rank)
        self.progress = MessageProgress()
        self.arenas: dict[int, PeerArena] = {}


@dataclass(frozen=True)
class Refusal:
    """Why a group does not share memory.

    Attributes:
        text: for people.
        is_one_host: whether its ranks run on one host, so that it could have been otherwise.
        error: what kept this very rank from it, if anything did.
    """

    text: str
    is_one_host: bool
    error: WorkerError | None = None


@dataclass(frozen=True)
class _Offer:
    """What a rank tells the others: who it is, its control segment, or what it lacks."""

    host: str
    process: int
    started: str
    descriptor: int
    problem: str


def why_not_here() -> str:
    """What this machine lacks for shared memory; empty if nothing."""
    if not sys.platform.startswith("linux"):
        return f"memory is shared by Linux's memfd, and this is {sys.platform}"
    if platform.machine() != "x86_64":
        # Python has no fence; x86 needs none, because it lets nobody see stores or loads out of order.
        return (
            f"shared memory without fences needs the memory order of x86-64, and this is {platform.machine()}"
        )
    return ""


def share_memory(
    host: SharedHost, group: dist.ProcessGroup, ranks: Sequence[int], index: int
) -> SharedTransport | Refusal:
    """Share memory with all ranks of `group`, or with none; every rank of it must call.

    Args:
        host: of this process.
        group: process group over which the ranks agree.
        ranks: their global ranks, in order of the group.
        index: this rank's position among them.
    """
    size, problem, error, segment = len(ranks), why_not_here(), None, None
    if not problem:
        try:
            segment = make_segment(_control_bytes(size))
        except WorkerError as caught:
            problem, error = caught.message, caught
    own = _Offer(
        _host_name(), os.getpid(), start_of(os.getpid()) or "", segment.descriptor if segment else -1, problem
    )
    offers: list[_Offer] = _everybody(own, group, size)
    is_one_host = len({offer.host for offer in offers}) == 1
    if not is_one_host:
        _close(segment)
        return Refusal(f"ranks {_list(ranks)} run on several hosts", is_one_host, error)
    lacking = [(rank, offer.problem) for rank, offer in zip(ranks, offers, strict=True) if offer.problem]
    if segment is None or lacking:
        _close(segment)
        return Refusal(f"rank {lacking[0][0]}: {lacking[0][1]}", is_one_host, error)
    try:
        maps = [
            segment.memory if i == index else open_segment(o.process, o.descriptor, _control_bytes(size))
            for i, o in enumerate(offers)
        ]
    except (OSError, ValueError) as caught:
        problem = f"memory of a peer cannot be opened: {caught}"
    opened: list[str] = _everybody(problem, group, size)  # nobody closes its descriptor before all have it
    _close(segment)
    failed = [(rank, text) for rank, text in zip(ranks, opened, strict=True) if text]
    if failed:
        return Refusal(f"rank {failed[0][0]}: {failed[0][1]}", is_one_host)
    peers = [
        Peer(rank, offer.process, offer.started, memoryview(memory).cast("q"))
        for rank, offer, memory in zip(ranks, offers, maps, strict=True)
    ]
    return _connected(host, peers, [torch.frombuffer(memory, dtype=torch.uint8) for memory in maps], index)


def _connected(
    host: SharedHost, peers: Sequence[Peer], segments: Sequence[torch.Tensor], index: int
) -> SharedTransport:
    size, words = len(peers), peers[index].words
    first_slot = _word_bytes(size)
    first_ring = first_slot + ALL_SLOTS_BYTES

    def ring(sender: int, receiver: int) -> list[torch.Tensor]:
        start = first_ring + receiver * NUM_PIECES * PIECE_BYTES
        return list(segments[sender][start : start + NUM_PIECES * PIECE_BYTES].split(PIECE_BYTES))

    links = {
        i: Link(
            peer,
            words,
            outbox=ring(index, i),
            inbox=ring(i, index),
            written=written_word(i),
            taken=taken_word(i, size),
            peer_written=written_word(index),
            peer_taken=taken_word(index, size),
        )
        for i, peer in enumerate(peers)
        if i != index
    }
    neighbours = []
    for i, peer in enumerate(peers):
        neighbours.append(Neighbour(peer.rank, peer.words, segments[i][first_slot:first_ring]))
        if i != index:
            host.arenas.setdefault(peer.rank, PeerArena(peer.process, host.arena))
    others = [peer for i, peer in enumerate(peers) if i != index]
    return SharedTransport(
        index,
        neighbours,
        barrier=Barrier(words, others, host.progress),
        messages=Messages(links, host.progress),
        arena=host.arena,
        arenas=host.arenas,
    )


def _word_bytes(size: int) -> int:
    nbytes = 8 * (FIRST_MESSAGE_WORD + message_words(size))
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


def _control_bytes(size: int) -> int:
    """Words, slots and rings of a rank; pages that nothing goes through are never touched."""
    return _word_bytes(size) + ALL_SLOTS_BYTES + size * NUM_PIECES * PIECE_BYTES


def _everybody(own: Any, group: dist.ProcessGroup, size: int) -> list[Any]:
    said: list[Any] = [None] * size
    dist.all_gather_object(said, own, group=group)
    return said


def _close(segment: Segment | None) -> None:
    if segment is not None:
        os.close(segment.descriptor)


def _host_name() -> str:
    """Equal for processes that see each other: the boot of a kernel, and what it lets them see."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    spaces = (Path("/proc/self/ns") / name for name in ("pid", "net"))
    if not boot.exists():
        return platform.node()
    return " ".join([boot.read_text().strip(), *(os.readlink(path) for path in spaces if path.exists())])


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}..{ranks[-1]}"
