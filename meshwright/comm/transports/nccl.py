"""NCCL, for CUDA tensors: torch's own collectives, one communicator (and so one stream) a group.

Waiting makes the current stream wait, never the host; `Work` keeps the tensors until then. NCCL reduces in the
dtype that travels, so callers hand it fp32 gradients.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transports.base import Work

# torch 2.13 renamed the single-tensor collectives; 2.11 only has the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NcclTransport:
    """Collectives of one NCCL process group."""

    name = "nccl"

    def __init__(self, group: dist.ProcessGroup, index: int, size: int) -> None:
        self._group = group
        self._index = index
        self._size = size

    @property
    def scratch_bytes(self) -> int:
        """None of ours: NCCL keeps its own."""
        return 0

    def allocate(self, numel: int, dtype: torch.dtype) -> None:
        """See `Transport`: any memory serves."""

    def allocate_common(self, numel: int, dtype: torch.dtype) -> None:
        """See `Transport`: there is none."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """See `Transport`."""
        return Work([dist.all_reduce(tensor, group=self._group, async_op=True)], keep=tensor)

    def reduce(self, tensor: Tensor, index: int) -> Work:
        """See `Transport`."""
        return Work([dist.reduce(tensor, group_dst=index, group=self._group, async_op=True)], keep=tensor)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport`."""
        work = _reduce_scatter_single(output, source, group=self._group, async_op=True)
        return Work([work], keep=(output, source))

    def all_gather(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport`."""
        work = _all_gather_single(output, source, group=self._group, async_op=True)
        return Work([work], keep=(output, source))

    def broadcast(self, tensor: Tensor, index: int) -> Work:
        """See `Transport`."""
        return Work([dist.broadcast(tensor, group_src=index, group=self._group, async_op=True)], keep=tensor)

    def all_to_all(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport`."""
        work = dist.all_to_all_single(output, source, group=self._group, async_op=True)
        return Work([work], keep=(output, source))

    def send(self, tensor: Tensor, index: int, tag: int) -> Work:
        """See `Transport`. NCCL ignores tags: both sides must issue in the same order."""
        return Work([dist.isend(tensor, group=self._group, group_dst=index)], keep=tensor)

    def receive(self, tensor: Tensor, index: int, tag: int) -> Work:
        """See `Transport`. NCCL ignores tags: both sides must issue in the same order."""
        return Work([dist.irecv(tensor, group=self._group, group_src=index)], keep=tensor)

    def barrier(self) -> Work:
        """See `Transport`."""
        return Work([dist.barrier(group=self._group, async_op=True)])

    def lowered(self, op: str, nbytes: int, index: int = 0) -> Counter[str]:
        """See `Transport`: one to one."""
        return Counter({op: 1})
