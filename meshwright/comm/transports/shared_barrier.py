"""How ranks on one host wait for each other: words in shared memory that one rank writes and the others read.

Each rank has a control segment a group: a word that says how far it has come, words about the tensor it brought, and
words for messages. A word has one writer, and counts only upwards. Data is written before the word that announces it
and read after it. On x86 the processor keeps that order of stores and of loads, so no fence is needed; where it does
not, this transport is refused (`shared_connect.py`).

Waiting looks at the word for some microseconds, then lets others run, then sleeps: ranks may outnumber cores. While it
waits, messages of other operations move on, and a peer that died or left is noticed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol
from zlib import crc32

from meshwright.comm.transports.shared_segment import Place

# Looks at a word before others may run: a few microseconds, the time that another core takes to answer.
LOOKS = 100
# Times that others may run before this rank sleeps, about half a millisecond.
_YIELDS = 200
_FIRST_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 5e-5, 5e-4
# How often a waiting rank asks whether its peer still lives.
_LIFE_SECONDS = 0.1

# Words (8 bytes) of a control segment. Words that different ranks read while others are written stand 64 bytes apart.
LINE = 8
_ARRIVED, _LEFT = 0, 1
_TENSORS = LINE  # two lines, used in turn
FIRST_MESSAGE_WORD = 3 * LINE
# The low bits of `arrived` say which call it is.
_CALL_BITS = 24


class Progress(Protocol):
    """What goes on while a rank waits."""

    def advance(self) -> None:
        """Move messages as far as they go without waiting."""


@dataclass(frozen=True)
class Peer:
    """Another rank of the group.

    Attributes:
        rank: global rank, for texts.
        process: its number.
        started: when it started, as /proc says.
        words: its control segment.
    """

    rank: int
    process: int
    started: str
    words: memoryview

    def check(self) -> None:
        """Raise RuntimeError where the peer has died or left the group."""
        if self.words[_LEFT]:
            raise RuntimeError(f"rank {self.rank} has left")
        if start_of(self.process) != self.started:
            raise RuntimeError(f"rank {self.rank} (process {self.process}) has died")


def start_of(process: int) -> str | None:
    """When a process started, in the kernel's ticks; None where it has ended, waited for or not."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


@lru_cache(maxsize=4096)
def call_number(op: str, *arguments: object) -> int:
    """A number for a call, the same on every rank: ranks that leave the common order wait for each other for ever."""
    return crc32(repr((op, *arguments)).encode()) & ((1 << _CALL_BITS) - 1)


class Barrier:
    """The common order of one group's collectives.

    Args:
        words: this rank's control segment.
        peers: the other ranks.
        progress: what goes on while this rank waits.

    Attributes:
        turn: which of two places the next barrier's data belongs in. What is written there before a barrier may be
            read after it until this rank's next one, for a rank gets past that only when all have come to it.
    """

    def __init__(self, words: memoryview, peers: Iterable[Peer], progress: Progress) -> None:
        self._words = words
        self._peers = [(peer, peer.words) for peer in peers]
        self._progress = progress
        self._count = 0
        self.turn = 1

    def meet(self, call: int) -> None:
        """Return once every rank has come to this barrier with the same call.

        Raises:
            RuntimeError: a rank that has not come died or left.
        """
        self._count += 1
        value = self._count << _CALL_BITS | call
        self._words[_ARRIVED] = value
        beyond = (self._count + 1) << _CALL_BITS
        for peer, words in self._peers:
            for _ in range(LOOKS):
                seen = words[_ARRIVED]
                if seen == value or seen >= beyond:
                    break
            else:
                self._wait(peer, words, value, beyond)
        self.turn = (self._count + 1) & 1

    def _wait(self, peer: Peer, words: memoryview, value: int, beyond: int) -> None:
        def has_come() -> bool:
            seen: int = words[_ARRIVED]
            return seen == value or seen >= beyond

        try:
            wait_until(has_come, [peer], self._progress)
        except RuntimeError:
            self.leave()
            raise

    def show(self, place: Place, freed: int, route: int = 0) -> None:
        """Tell the peers, before the next barrier, where this rank's tensor is, and how it would have it go."""
        first = _TENSORS + self.turn * LINE
        words = self._words
        words[first], words[first + 1], words[first + 2] = place.owner, place.serial, place.descriptor
        words[first + 3], words[first + 4], words[first + 5] = place.nbytes, place.offset, freed
        words[first + 6] = route

    @staticmethod
    def shown(words: memoryview, turn: int) -> tuple[Place, int]:
        """What the rank with `words` showed before the barrier of `turn`."""
        first = _TENSORS + turn * LINE
        return Place(*(words[first + i] for i in range(5))), words[first + 5]

    @staticmethod
    def shown_route(words: memoryview, turn: int) -> int:
        """How the rank with `words` would have its tensor go."""
        route: int = words[_TENSORS + turn * LINE + 6]
        return route

    def leave(self) -> None:
        """Tell the peers that this rank comes to no further barrier."""
        self._words[_LEFT] = 1


def wait_until(is_done: Callable[[], bool], peers: Iterable[Peer], progress: Progress) -> None:
    """Return once `is_done`, letting other processes run meanwhile.

    Raises:
        RuntimeError: one of `peers` died or left, and what it wrote before does not suffice.
    """
    attempts, sleep, last_check = 0, _FIRST_SLEEP_SECONDS, time.monotonic()
    while not is_done():
        progress.advance()
        attempts += 1
        if attempts < _YIELDS:
            os.sched_yield()
            continue
        time.sleep(sleep)
        sleep = min(1.1 * sleep, _LONGEST_SLEEP_SECONDS)
        now = time.monotonic()
        if now - last_check < _LIFE_SECONDS:
            continue
        last_check = now
        try:
            for peer in peers:
                peer.check()
        except RuntimeError:
            progress.advance()
            if not is_done():
                raise
            return
