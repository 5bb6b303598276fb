"""Receive buffers: kept for reuse, and no part of what a model makes, nor are views of them."""

from __future__ import annotations

import torch

from meshwright.comm.transports.scratch import ScratchBuffers
from meshwright.recompute.live_bytes import LiveBytes


def test_buffers_are_used_again_and_not_counted_as_a_models() -> None:
    scratch = ScratchBuffers()
    with LiveBytes() as meter:
        own = torch.zeros(8)
        taken = scratch.take(100, torch.float32)
        assert (taken.shape, taken.dtype) == ((100,), torch.float32)
        taken[:10].view(2, 5).fill_(1)
        scratch.give(taken)
        assert scratch.take(50, torch.float64).data_ptr() == taken.data_ptr()
        assert meter.total == own.nbytes
    assert scratch.nbytes == 400
