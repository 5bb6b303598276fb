"""Receive buffers that transports keep for reuse. Not for several threads at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class ScratchBuffers:
    """Receive buffers kept for reuse: as many as were ever in flight at once, each as large as was ever asked."""

    def __init__(self) -> None:
        self._all: list[Tensor] = []
        self._free: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._all)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of `numel` elements with unspecified values."""
        with _disable_current_modes():  # what counts a model's tensors need not see these (guarded by a test)
            return self._take(numel * dtype.itemsize).view(dtype)

    def _take(self, nbytes: int) -> Tensor:
        large_enough = [buffer for buffer in self._free if buffer.numel() >= nbytes]
        if large_enough:
            buffer = min(large_enough, key=Tensor.numel)
            self._remove(self._free, buffer)
        else:
            if self._free:  # replace a buffer that is too small instead of keeping both
                smaller = self._free.pop()
                self._remove(self._all, smaller)
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            self._all.append(buffer)
        return buffer[:nbytes]

    def give(self, taken: Tensor) -> None:
        """Return what `take` gave."""
        address = taken.data_ptr()
        self._free.append(next(buffer for buffer in self._all if buffer.data_ptr() == address))

    @staticmethod
    def _remove(buffers: list[Tensor], buffer: Tensor) -> None:
        position = next(i for i, other in enumerate(buffers) if other is buffer)
        del buffers[position]
