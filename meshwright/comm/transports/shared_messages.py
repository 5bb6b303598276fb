"""Sends and receives between ranks on one host: a ring of slots from each rank to each other one.

The sender copies a message into the slots piece by piece, the receiver takes them out in that order; a word of each
says how many pieces it has written or taken. Messages of one pair travel one behind another. One that arrives before
it is asked for is kept in private memory. Nobody waits at the call: messages move when they are issued, and whenever
a rank waits for anything (so two ranks may both send first); a rank that computes moves none.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.comm.transports.shared_barrier import FIRST_MESSAGE_WORD, LINE, LOOKS, Peer, wait_until

# Slots of a ring and their size: pieces of a large message are copied out while the next ones are copied in. So many
# because what is written should not lie in the reader's cache any more (see `shared.py`).
NUM_PIECES = 32
PIECE_BYTES = 256 << 10
# Words of a ring's writer: how many pieces it has written; then tag and length of the message of each slot.
_WRITTEN, _HEADERS = 0, LINE
_RING_WORDS = LINE + 2 * NUM_PIECES


def message_words(size: int) -> int:
    """Words of a control segment that the messages of a group of `size` ranks need."""
    return size * (_RING_WORDS + LINE)


def written_word(index: int) -> int:
    """First of the words of the ring to rank `index`, in the control segment of the sender."""
    return FIRST_MESSAGE_WORD + index * _RING_WORDS


def taken_word(index: int, size: int) -> int:
    """How many pieces from rank `index` have been taken, in the control segment of the receiver."""
    return FIRST_MESSAGE_WORD + size * _RING_WORDS + index * LINE


@dataclass(eq=False)
class Message:
    """A message on its way, or a place for one.

    Attributes:
        tag: of the message.
        content: its bytes.
        position: bytes sent or received so far.
        is_done: whether all of it has moved.
    """

    tag: int
    content: Tensor
    position: int = 0
    is_done: bool = False


@dataclass(eq=False)
class Link:
    """Both rings between this rank and a peer.

    Attributes:
        peer: the other rank.
        words: this rank's control segment.
        outbox, inbox: slots to the peer and from it.
        written, taken: where the counts of this rank stand; the peer's own are at `peer_taken` and `peer_written`.
        sending: messages to the peer, the first on its way.
        expected: by tag, places for messages from the peer.
        kept: by tag, messages that nobody has asked for yet.
        arriving: the message whose pieces come next.
    """

    peer: Peer
    words: memoryview
    outbox: list[Tensor]
    inbox: list[Tensor]
    written: int
    taken: int
    peer_written: int
    peer_taken: int
    num_written: int = 0
    num_taken: int = 0
    sending: deque[Message] = field(default_factory=deque)
    expected: dict[int, deque[Message]] = field(default_factory=dict)
    kept: dict[int, deque[Message]] = field(default_factory=dict)
    arriving: Message | None = None

    def push(self) -> None:
        """Copy messages out as long as slots are free."""
        while self.sending and self.num_written - self.peer.words[self.peer_taken] < NUM_PIECES:
            message, slot = self.sending[0], self.num_written % NUM_PIECES
            nbytes = message.content.numel()
            header = self.written + _HEADERS + 2 * slot
            self.words[header], self.words[header + 1] = message.tag, nbytes
            stop = min(message.position + PIECE_BYTES, nbytes)
            self.outbox[slot][: stop - message.position].copy_(message.content[message.position : stop])
            message.position = stop
            self.num_written += 1
            self.words[self.written] = self.num_written
            if stop == nbytes:
                message.is_done = True
                self.sending.popleft()

    def pull(self) -> None:
        """Copy in whatever has arrived."""
        while self.num_taken < self.peer.words[self.peer_written]:
            slot = self.num_taken % NUM_PIECES
            if self.arriving is None:
                header = self.peer_written + _HEADERS + 2 * slot
                self.arriving = self._place_for(self.peer.words[header], self.peer.words[header + 1])
            message = self.arriving
            nbytes = message.content.numel()
            stop = min(message.position + PIECE_BYTES, nbytes)
            message.content[message.position : stop].copy_(self.inbox[slot][: stop - message.position])
            message.position = stop
            self.num_taken += 1
            self.words[self.taken] = self.num_taken
            if stop == nbytes:
                message.is_done = True
                self.arriving = None

    def _place_for(self, tag: int, nbytes: int) -> Message:
        waiting = self.expected.get(tag)
        if waiting:
            return self._fitting(waiting.popleft(), nbytes)
        message = Message(tag, torch.empty(nbytes, dtype=torch.uint8))
        self.kept.setdefault(tag, deque()).append(message)
        return message

    def claim(self, tag: int, nbytes: int) -> Message | None:
        """The oldest kept message of `tag`, which may still be arriving."""
        waiting = self.kept.get(tag)
        return self._fitting(waiting.popleft(), nbytes) if waiting else None

    def _fitting(self, message: Message, nbytes: int) -> Message:
        if message.content.numel() != nbytes:
            raise RuntimeError(
                f"a message of rank {self.peer.rank} with tag {message.tag} has another length than the tensor for it: "
                f"{nbytes:,} and {message.content.numel():,} bytes"
            )
        return message


class Messages:
    """All sends and receives of this rank in one group."""

    def __init__(self, links: Mapping[int, Link], progress: MessageProgress) -> None:
        self._links = links
        self._progress = progress
        progress.join(self)

    @property
    def kept_bytes(self) -> int:
        """Bytes of messages that arrived before they were asked for."""
        kept = (messages for link in self._links.values() for messages in link.kept.values())
        return sum(message.content.numel() for messages in kept for message in messages)

    def send(self, tensor: Tensor, index: int, tag: int) -> WaitingMessage:
        """Queue `tensor` for rank `index`."""
        link, message = self._links[index], Message(tag, _bytes_of(tensor))
        with self._progress.lock:
            link.sending.append(message)
            link.push()
        return WaitingMessage(message, link.peer, self._progress)

    def receive(self, tensor: Tensor, index: int, tag: int) -> WaitingMessage:
        """Expect a message of rank `index` in `tensor`."""
        link, target = self._links[index], _bytes_of(tensor)
        with self._progress.lock:
            message = link.claim(tag, target.numel())
            if message is not None:
                return WaitingMessage(message, link.peer, self._progress, target)
            message = Message(tag, target)
            link.expected.setdefault(tag, deque()).append(message)
            link.pull()
        return WaitingMessage(message, link.peer, self._progress)

    def advance(self) -> None:
        """Move all that can move now."""
        for link in self._links.values():
            link.push()
            link.pull()


def _bytes_of(tensor: Tensor) -> Tensor:
    return (tensor.detach() if tensor.requires_grad else tensor).view(-1).view(torch.uint8)


@dataclass(eq=False)
class WaitingMessage:
    """What a call returned: `wait` until the message has left, or is there.

    Attributes:
        target: where a message that was kept belongs.
    """

    message: Message
    peer: Peer
    progress: MessageProgress
    target: Tensor | None = None

    def wait(self) -> None:
        """Return when the tensor of the call may be used; RuntimeError where the peer died or left."""
        for _ in range(LOOKS):
            if self.message.is_done:
                break
            self.progress.advance()
        else:
            wait_until(lambda: self.message.is_done, [self.peer], self.progress)
        if self.target is not None:
            self.target.copy_(self.message.content)


class MessageProgress:
    """Moves the messages of all groups of this process; one thread at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._all: tuple[Messages, ...] = ()

    def join(self, messages: Messages) -> None:
        """Move these messages too."""
        self._all += (messages,)

    def advance(self) -> None:
        """See `shared_barrier.Progress`; does nothing while another thread does it."""
        if self.lock.acquire(blocking=False):
            try:
                for messages in self._all:
                    messages.advance()
            finally:
                self.lock.release()
