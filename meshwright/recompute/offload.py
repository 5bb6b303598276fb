"""What autograd saves of a module goes to host memory, and comes back in backward; weights stay.

Copies out run on a stream of their own, behind the kernels that made the tensors; copies back on the stream of the
backward. Host memory is pinned, from torch's caching allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.recompute.forwards import replace_forwards
from meshwright.recompute.holders import Weights


@dataclass(frozen=True, eq=False)
class _InHost:
    """A tensor in host memory, where it belongs, and the event behind its copy."""

    copy: Tensor
    device: torch.device
    ready: torch.cuda.Event


class Offloader:
    """Wraps modules; one for a device.

    Args:
        modules: name to module.
        weights: where they are.
        device: a GPU.
    """

    def __init__(self, modules: dict[str, nn.Module], weights: Weights, device: torch.device) -> None:
        self._modules = modules
        self._weights = weights
        self._stream = torch.cuda.Stream(device)

    def install(self) -> Callable[[], None]:
        """Wrap the forwards of the instances; returns what puts them back."""
        return replace_forwards(self._modules, lambda _name, forward: self._wrapped(forward))

    def _wrapped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with saved_tensors_hooks(self._pack, self._unpack):
                return forward(*args, **kwargs)

        return run

    def _pack(self, tensor: Tensor) -> object:
        if not tensor.is_cuda or self._weights.is_weight(tensor):
            return self._weights.pack(tensor)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not given away before the copy is done
        return _InHost(copy, tensor.device, self._stream.record_event())

    def _unpack(self, packed: object) -> Tensor:
        if not isinstance(packed, _InHost):
            return self._weights.unpack(packed)
        torch.cuda.current_stream(packed.device).wait_event(packed.ready)
        return packed.copy.to(packed.device, non_blocking=True)
