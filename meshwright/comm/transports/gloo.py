"""Gloo over TCP, for CPU tensors.

Gloo's own reduce-scatter moves as many bytes as an all-reduce and its all-gather is slow, so both are rebuilt:
all-to-all plus a local sum, or point-to-point straight into place, chosen by size (measured in
`benchmarks/RESULTS.md`). The local sum runs in rank order, so results repeat bit by bit.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transports.base import Work
from meshwright.comm.transports.scratch import ScratchBuffers

# Below: all-to-all and broadcasts win; above: point-to-point does.
POINT_TO_POINT_BYTES = 4 << 20
# Below this total size Gloo's own all-gather has the least latency.
NATIVE_GATHER_BYTES = 64 << 10
# Receives that one reduction to this rank keeps open: the next tensor arrives while one is added.
_RECEIVES_IN_FLIGHT = 2
_TAGS = 1 << 15  # collectives use the lower half of the tag space, send and receive the upper

# torch 2.13 renamed the single-tensor collectives; 2.11 only has the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GlooTransport:
    """Collectives of one Gloo process group.

    Args:
        group: the process group.
        index: this rank's position in it.
        size: number of ranks.
    """

    name = "gloo"

    def __init__(self, group: dist.ProcessGroup, index: int, size: int) -> None:
        self._group = group
        self._index = index
        self._size = size
        self._sequence = 0
        self._scratch = ScratchBuffers()

    @property
    def scratch_bytes(self) -> int:
        """Bytes of receive buffers, in flight or kept for reuse."""
        return self._scratch.nbytes

    def allocate(self, numel: int, dtype: torch.dtype) -> None:
        """See `Transport`: any memory serves."""

    def allocate_common(self, numel: int, dtype: torch.dtype) -> None:
        """See `Transport`: there is none."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """See `Transport`. Gloo's own: no arrangement of sends beats it."""
        return Work([dist.all_reduce(tensor, group=self._group, async_op=True)], keep=tensor)

    def reduce(self, tensor: Tensor, index: int) -> Work:
        """See `Transport`. Every rank sends its tensor once, straight to `index`, which adds in rank order."""
        tag = self._next_tag()
        if self._index != index:
            return Work([self._send(tensor, index, tag)], keep=tensor)
        senders = sorted(self._others())
        return Work([_IncomingSum(tensor, senders, partial(self._receive, tag=tag), self._scratch)])

    def reduce_scatter(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport`."""
        blocks = source.view(self._size, -1)
        if source.numel() * source.element_size() < POINT_TO_POINT_BYTES:
            scratch = self._scratch.take(source.numel(), source.dtype)
            parts = [dist.all_to_all_single(scratch, source, group=self._group, async_op=True)]
            received = list(scratch.view(self._size, -1))
        else:
            scratch = self._scratch.take(source.numel() - blocks.shape[1], source.dtype)
            rows = iter(scratch.view(self._size - 1, -1))
            received = [blocks[i] if i == self._index else next(rows) for i in range(self._size)]
            tag = self._next_tag()
            parts = [self._receive(received[i], i, tag) for i in self._others()]
            parts += [self._send(blocks[i], i, tag) for i in self._others()]
        return Work(parts, partial(self._sum, output, received, scratch), keep=source)

    def all_gather(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport`."""
        blocks = output.view(self._size, -1)
        nbytes = output.numel() * output.element_size()
        if nbytes < NATIVE_GATHER_BYTES:
            return Work([_all_gather_single(output, source, group=self._group, async_op=True)], keep=source)
        mine = blocks[self._index]
        if mine.data_ptr() != source.data_ptr():
            mine.copy_(source)
        if nbytes < POINT_TO_POINT_BYTES:
            parts = [
                dist.broadcast(blocks[i], group_src=i, group=self._group, async_op=True)
                for i in range(self._size)
            ]
        else:
            tag = self._next_tag()
            parts = [self._receive(blocks[i], i, tag) for i in self._others()]
            parts += [self._send(mine, i, tag) for i in self._others()]
        return Work(parts, keep=output)

    def broadcast(self, tensor: Tensor, index: int) -> Work:
        """See `Transport`."""
        return Work([dist.broadcast(tensor, group_src=index, group=self._group, async_op=True)], keep=tensor)

    def all_to_all(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport`."""
        work = dist.all_to_all_single(output, source, group=self._group, async_op=True)
        return Work([work], keep=(output, source))

    def send(self, tensor: Tensor, index: int, tag: int) -> Work:
        """See `Transport`."""
        return Work([self._send(tensor, index, _TAGS + tag)], keep=tensor)

    def receive(self, tensor: Tensor, index: int, tag: int) -> Work:
        """See `Transport`."""
        return Work([self._receive(tensor, index, _TAGS + tag)], keep=tensor)

    def barrier(self) -> Work:
        """See `Transport`."""
        return Work([dist.barrier(group=self._group, async_op=True)])

    def lowered(self, op: str, nbytes: int, index: int = 0) -> Counter[str]:
        """See `Transport`."""
        others = self._size - 1
        point_to_point = Counter({"send": others, "receive": others})
        if op == "reduce":
            return Counter({"receive": others} if index == self._index else {"send": 1})
        if op == "reduce_scatter":
            return point_to_point if nbytes >= POINT_TO_POINT_BYTES else Counter({"all_to_all": 1})
        if op == "all_gather" and nbytes >= NATIVE_GATHER_BYTES:
            return point_to_point if nbytes >= POINT_TO_POINT_BYTES else Counter({"broadcast": self._size})
        return Counter({op: 1})

    def _others(self) -> list[int]:
        """The other ranks, each rank starting with its right neighbour so that nobody is everybody's first."""
        return [(self._index + step) % self._size for step in range(1, self._size)]

    def _next_tag(self) -> int:
        # A tag a collective: ranks that leave the common order wait for each other (and the watchdog names
        # them) instead of silently receiving another collective's bytes.
        self._sequence = (self._sequence + 1) % _TAGS
        return self._sequence

    def _send(self, tensor: Tensor, index: int, tag: int) -> dist.Work | None:
        return dist.isend(tensor, group=self._group, group_dst=index, tag=tag)

    def _receive(self, tensor: Tensor, index: int, tag: int) -> dist.Work | None:
        return dist.irecv(tensor, group=self._group, group_src=index, tag=tag)

    def _sum(self, output: Tensor, received: list[Tensor], scratch: Tensor) -> None:
        """`output = received[0] + received[1] + ...` in rank order; `output` may alias this rank's own part."""
        if self._index == 0 or self._size == 2:
            torch.add(received[0], received[1], out=output)
            for part in received[2:]:
                output.add_(part)
        else:
            total = received[0]  # scratch, free to be overwritten; `output` may alias a later part
            for part in received[1:-1]:
                total.add_(part)
            torch.add(total, received[-1], out=output)
        self._scratch.give(scratch)


class _IncomingSum:
    """Tensors of other ranks added to `tensor` in rank order; few receive buffers, however many ranks send."""

    def __init__(
        self,
        tensor: Tensor,
        senders: Sequence[int],
        receive: Callable[[Tensor, int], dist.Work | None],
        buffers: ScratchBuffers,
    ) -> None:
        self._tensor = tensor
        self._senders = deque(senders)
        self._receive = receive
        self._buffers = buffers
        self._coming: deque[tuple[Tensor, dist.Work | None]] = deque()
        for _ in range(_RECEIVES_IN_FLIGHT):
            self._start_next()

    def _start_next(self) -> None:
        if self._senders:
            buffer = self._buffers.take(self._tensor.numel(), self._tensor.dtype)
            self._coming.append((buffer, self._receive(buffer, self._senders.popleft())))

    def wait(self) -> None:
        """Return when the sum is complete."""
        while self._coming:
            buffer, work = self._coming.popleft()
            if work is not None:
                work.wait()
            self._tensor.add_(buffer)
            self._buffers.give(buffer)
            self._start_next()
