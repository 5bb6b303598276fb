"""Faults that real runs meet, as data, and tools that commit them on request.

Owns the list of known faults. A fault of the program is committed by `commit` before the call, so that the
rank's log says what the program did; a fault of the network by `FaultyTransport`, after the call is logged.
Knows nothing of how faults are noticed.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from meshwright.comm.ops import Group
from meshwright.comm.transports.base import Transport, Work


@dataclass(frozen=True)
class Fault:
    """A kind of failure.

    Attributes:
        name: how rules refer to it.
        description: what happens.
        source: where it was met in public.
        of_network: whether it is committed after the call is logged.
        noticed_as: error codes that a run with this fault may end with; none: the run goes on.
    """

    name: str
    description: str
    source: str
    of_network: bool
    noticed_as: tuple[str, ...]


_ALL = (
    Fault(
        name="kill",
        description="the process is killed from outside, as the kernel does when memory runs out",
        source="https://github.com/hpcaitech/ColossalAI/issues/3514",
        of_network=False,
        noticed_as=("E401",),
    ),
    Fault(
        name="raise",
        description="Python code between two operations raises",
        source="https://github.com/pytorch/pytorch/issues/97191",
        of_network=False,
        noticed_as=("E401",),
    ),
    Fault(
        name="hang",
        description="the rank never comes to the operation, as when its data loader is stuck",
        source="https://github.com/IGNF/myria3d/issues/123",
        of_network=False,
        noticed_as=("E402",),
    ),
    Fault(
        name="skip",
        description="the program leaves out an operation that its peers issue, as on a branch only one rank takes",
        source="https://github.com/deepspeedai/DeepSpeed/issues/7998",
        of_network=False,
        noticed_as=("E402", "E404"),
    ),
    Fault(
        name="resize",
        description="the tensor has one element more than its peers' tensors",
        source="https://github.com/PrimeIntellect-ai/prime-diloco/issues/68",
        of_network=False,
        noticed_as=("E404",),
    ),
    Fault(
        name="delay",
        description="the operation starts late, as on a slow machine or a shared one",
        source="https://github.com/NVIDIA/nccl/issues/708",
        of_network=True,
        noticed_as=(),
    ),
    Fault(
        name="drop",
        description="the operation is issued and never reaches the network",
        source="https://github.com/pytorch/pytorch/issues/118369",
        of_network=True,
        noticed_as=("E401", "E402"),
    ),
)
FAULTS = MappingProxyType({fault.name: fault for fault in _ALL})


class InjectedError(Exception):
    """What the fault `raise` raises."""


@dataclass(frozen=True)
class FaultRule:
    """Commit `fault` on `rank` at its operation number `operation`, counted from 0.

    Attributes:
        fault: a name in `FAULTS`.
        rank: global rank.
        operation: which operation.
        seconds: length of a delay.
    """

    fault: str
    rank: int
    operation: int
    seconds: float = 0.5

    def __post_init__(self) -> None:
        assert self.fault in FAULTS, f"fault {self.fault!r} is none of {', '.join(FAULTS)}"

    def applies(self, rank: int, operation: int) -> bool:
        """Whether this is the rank and the operation."""
        return (rank, operation) == (self.rank, self.operation)


def commit(rule: FaultRule, tensor: Tensor, *, rank: int, operation: int) -> Tensor | None:
    """What the program hands to its operation number `operation`: None when it skips it.

    Where the rule does not apply, `tensor` itself. Otherwise a fault of the program happens here: the process
    is killed, raises, hangs, skips, or goes on with a tensor of one element more.

    Raises:
        InjectedError: the fault is `raise`.
    """
    if not rule.applies(rank, operation):
        return tensor
    match rule.fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise InjectedError(f"injected before operation {operation} of rank {rank}")
        case "hang":
            while True:
                time.sleep(3600)
        case "skip":
            return None
        case "resize":
            return torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    raise AssertionError(f"{rule.fault!r} is a fault of the network: wrap the group by faulty_group")


class FaultyTransport:
    """A transport that delays or drops one of its operations.

    Args:
        inner: the transport that does the work.
        rule: a fault of the network; operations of this transport are counted from 0.
        rank: global rank of this process.
    """

    def __init__(self, inner: Transport, rule: FaultRule, *, rank: int) -> None:
        assert FAULTS[rule.fault].of_network, f"{rule.fault!r} is a fault of the program: call commit"
        self.name = inner.name
        self._inner = inner
        self._rule = rule
        self._rank = rank
        self._num_operations = 0

    @property
    def scratch_bytes(self) -> int:
        """See `Transport`."""
        return self._inner.scratch_bytes

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """See `Transport`."""
        return self._inner.allocate(numel, dtype)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """See `Transport`."""
        return self._inner.allocate_common(numel, dtype)

    def _issue(self, call: Callable[[], Work]) -> Work:
        operation, self._num_operations = self._num_operations, self._num_operations + 1
        if self._rule.applies(self._rank, operation):
            if self._rule.fault == "drop":
                return Work(())
            time.sleep(self._rule.seconds)
        return call()

    def all_reduce(self, tensor: Tensor) -> Work:
        """See `Transport`."""
        return self._issue(lambda: self._inner.all_reduce(tensor))

    def reduce(self, tensor: Tensor, index: int) -> Work:
        """See `Transport`."""
        return self._issue(lambda: self._inner.reduce(tensor, index))

    def reduce_scatter(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport`."""
        return self._issue(lambda: self._inner.reduce_scatter(output, source))

    def all_gather(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport`."""
        return self._issue(lambda: self._inner.all_gather(output, source))

    def broadcast(self, tensor: Tensor, index: int) -> Work:
        """See `Transport`."""
        return self._issue(lambda: self._inner.broadcast(tensor, index))

    def all_to_all(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport`."""
        return self._issue(lambda: self._inner.all_to_all(output, source))

    def send(self, tensor: Tensor, index: int, tag: int) -> Work:
        """See `Transport`."""
        return self._issue(lambda: self._inner.send(tensor, index, tag))

    def receive(self, tensor: Tensor, index: int, tag: int) -> Work:
        """See `Transport`."""
        return self._issue(lambda: self._inner.receive(tensor, index, tag))

    def barrier(self) -> Work:
        """See `Transport`."""
        return self._issue(self._inner.barrier)

    def lowered(self, op: str, nbytes: int, index: int = 0) -> Counter[str]:
        """See `Transport`."""
        return self._inner.lowered(op, nbytes, index)


def faulty_group(group: Group, rule: FaultRule) -> Group:
    """The group with a transport that commits the rule's fault."""
    assert group.transport is not None, f"group {group.axis} of one rank has no transport"
    transport = FaultyTransport(group.transport, rule, rank=group.ranks[group.index])
    return replace(group, transport=transport)
