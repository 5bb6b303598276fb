"""Optimizer state in host memory: what the optimizer reads and updates there, and the copies to and from the device.

On CUDA the host memory is pinned; a gradient goes down on a stream of its own while backward goes on, and the host
waits for it only when the update needs it. Where the device is the host, the same copies are plain ones.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopies:
    """The stream on which gradients go down; one for all buckets of an engine."""

    def __init__(self, device: torch.device) -> None:
        self.is_pinned = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.is_pinned else None

    def start_down(self, host: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Start copying `source`, complete on the current stream, into `host`; see `HostShard.finish_fetch`."""
        if self._stream is None:
            host.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream):
            host.copy_(source, non_blocking=True)
            return self._stream.record_event()


class HostShard:
    """One bucket's part that this rank updates, in host memory.

    Attributes:
        master: what the optimizer updates, 1-D.
        gradient: what it reads, alike.
        is_fetched: whether the gradient of this step is here or on its way.
    """

    def __init__(self, numel: int, dtype: torch.dtype, copies: HostCopies) -> None:
        self.master = torch.zeros(numel, dtype=dtype, pin_memory=copies.is_pinned)
        self.gradient = torch.zeros(numel, dtype=dtype, pin_memory=copies.is_pinned)
        self.is_fetched = False
        self._copies = copies
        self._event: torch.cuda.Event | None = None

    def start_fetch(self, source: Tensor) -> None:
        """Start copying the summed gradient down."""
        self._event = self._copies.start_down(self.gradient, source)
        self.is_fetched = True

    def finish_fetch(self) -> None:
        """Return when the gradient is here."""
        event, self._event = self._event, None
        if event is not None:
            event.synchronize()

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.master.untyped_storage().nbytes() + self.gradient.untyped_storage().nbytes()
