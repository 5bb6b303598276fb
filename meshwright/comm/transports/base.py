"""The interface of a transport, and the work it returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Waitable(Protocol):
    """Anything with a `wait`, such as torch.distributed's Work."""

    def wait(self) -> object:
        """Return when the result may be used (on CUDA: make the current stream wait)."""


class Work:
    """Operations in flight, plus what must happen after them (a local sum, returning scratch memory).

    It keeps the tensors of the call alive until `wait`.
    """

    def __init__(
        self, parts: Sequence[Waitable | None], finish: Callable[[], None] | None = None, keep: object = None
    ) -> None:
        self._parts = parts
        self._finish = finish
        self._keep = keep

    def wait(self) -> None:
        """Wait for every part, then run the finishing work. A second call does nothing."""
        for part in self._parts:
            if part is not None:
                part.wait()
        if self._finish is not None:
            self._finish()
        self._parts, self._finish, self._keep = (), None, None


class Transport(Protocol):
    """Collectives over one group. All tensors are contiguous; sizes are in elements.

    `index` arguments count within the group. Every call returns at once.
    """

    name: str

    @property
    def scratch_bytes(self) -> int:
        """Bytes of receive buffers that the transport holds."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Zeros (1-D) in memory in which this transport's collectives are fastest; None where any memory serves."""

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Zeros (1-D) that are the same memory on every rank; all must call, and none does where None is returned.

        Whoever writes in it must know that nobody reads there; a gather into it from slices of it copies nothing.
        """

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum `tensor` over the group, in place."""

    def reduce(self, tensor: Tensor, index: int) -> Work:
        """Sum `tensor` over the group into that of rank `index`, in place; the others' may be overwritten."""

    def reduce_scatter(self, output: Tensor, source: Tensor) -> Work:
        """`output[i] = sum over ranks of source[index * n + i]`; `output` may be that slice of `source`."""

    def all_gather(self, output: Tensor, source: Tensor) -> Work:
        """Concatenate every rank's `source` in `output`; `source` may be this rank's slice of `output`."""

    def broadcast(self, tensor: Tensor, index: int) -> Work:
        """Copy `tensor` of rank `index` to all."""

    def all_to_all(self, output: Tensor, source: Tensor) -> Work:
        """Exchange equal blocks: block j of `source` goes to rank j, block j of `output` comes from it."""

    def send(self, tensor: Tensor, index: int, tag: int) -> Work:
        """Send `tensor` to rank `index`."""

    def receive(self, tensor: Tensor, index: int, tag: int) -> Work:
        """Receive into `tensor` from rank `index`."""

    def barrier(self) -> Work:
        """Return from `wait` once every rank has called."""

    def lowered(self, op: str, nbytes: int, index: int = 0) -> Counter[str]:
        """Wire operations that one logical `op` on `nbytes` of its largest tensor becomes on this rank.

        `index` is the rank that a reduce ends at.
        """
