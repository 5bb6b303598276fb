"""Witnesses of what a step sends: declared by formula, issued by the log, seen below torch and on the sockets."""

from __future__ import annotations

import dataclasses
import os
import socket
import stat
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.comm import ops
from meshwright.comm.log import CommEvent
from meshwright.layout.accounting import declared_calls, declared_wire_bytes
from meshwright.layout.policy import find_policy
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.state import TrainState
from meshwright.training.step import train_step

INPUTS, WIDTH, CLASSES = 64, 1100, 8
# Large enough that a bucket of one weight is closed by itself: sizes on all sides of the transport's thresholds.
BUCKET_BYTES = 32 << 10
OBSERVED_NAMES = {
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "_allgather_base_": "all_gather",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
# Offset of tcpi_bytes_acked in Linux's struct tcp_info; tcpi_bytes_received follows it.
TCP_INFO_BYTES_ACKED = 120


def _loss(model: Any, inputs: Tensor) -> tuple[Tensor, int]:
    return model(inputs).square().sum(), len(inputs)


def _state(mesh: Any, model: nn.Module, policy: str, **changes: Any) -> TrainState:
    row = dataclasses.replace(find_policy(policy), bucket_bytes=BUCKET_BYTES, **changes)
    engine = ShardingEngine(model, policy=row, groups=mesh.data_groups(), device=torch.device("cpu"))
    return TrainState(engine, ShardedOptimizer(OptimizerSpec("sgd"), engine.shards))


def _step(state: TrainState, num_microbatches: int, inputs: Tensor) -> None:
    train_step(
        state,
        lambda _: inputs,
        loss=_loss,
        num_microbatches=num_microbatches,
        lr=1e-3,
        clip_norm=None,
    )


def _event_bytes(event: CommEvent) -> int:
    return event.numel * getattr(torch, event.dtype).itemsize


class _Observer(TorchDispatchMode):
    """Counts what torch.distributed hands to its backend.

    torch's CommDebugMode counts the same way, but leaves out sends and receives, and its module tracker fails on
    a Sequential that runs more than once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[OBSERVED_NAMES[func.overloadpacket.__name__]] += 1
        return func(*args, **(kwargs or {}))


def _three_witnesses(
    mesh: Any, policy: str, num_microbatches: int, keep_last: bool
) -> dict[str, Counter[str]]:
    """Counters of one step: declared, issued, what the issued ones lower to, and what torch saw."""
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
    state = _state(mesh, model, policy, keep_last=keep_last)
    inputs = torch.ones(2, INPUTS)
    _step(state, num_microbatches, inputs)
    mesh.log.reset_counters()
    first = mesh.log.num_started
    with _Observer() as observer:
        _step(state, num_microbatches, inputs)
    issued = Counter({op: calls for (op, axis), calls in mesh.log.calls.items() if axis == "dp"})
    events = [event for event in mesh.log.events() if event.sequence >= first]
    assert [event.cause for event in events].count("step reduction") == 1
    issued["all_reduce"] -= 1
    lowered: Counter[str] = Counter()
    for event in events:
        lowered += mesh.group("dp").transport.lowered(event.op, _event_bytes(event))
    declared = declared_calls(state.engine.policy, state.engine.units, num_microbatches=num_microbatches)
    return {"declared": declared, "issued": +issued, "lowered": lowered, "observed": observer.calls}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize(
    ("policy", "keep_last"),
    [("ddp", True), ("zero1", True), ("zero2", True), ("zero3", True), ("zero3", False)],
)
def test_declared_is_issued_is_observed(
    ranks, policy: str, num_microbatches: int, world: int, keep_last: bool
) -> None:
    for counts in ranks.run(_three_witnesses, world, policy, num_microbatches, keep_last):
        assert counts["issued"] == counts["declared"]
        assert counts["observed"] == counts["lowered"]
        if policy == "ddp":
            assert set(counts["observed"]) == {"all_reduce"}
        else:  # buckets below and above every threshold
            kinds = {"all_reduce", "all_to_all", "all_gather", "broadcast", "send", "receive"}
            assert set(counts["observed"]) == kinds


def _sent_and_received() -> tuple[int, int]:
    """Payload bytes that the kernel counted on this process's own TCP connections; other processes do not matter."""
    sent, received = 0, 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            descriptor = os.dup(int(entry.name))
        except OSError:  # the descriptor of this listing itself
            continue
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            continue
        with socket.socket(fileno=descriptor) as connection:
            if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                acknowledged, got = struct.unpack_from("<QQ", raw, TCP_INFO_BYTES_ACKED)
                sent, received = sent + acknowledged, received + got
    return sent, received


def _wire(mesh: Any, policy: str, num_microbatches: int) -> tuple[int, int, int]:
    """Bytes of one step on one rank: declared, sent, received."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    state, inputs = _state(mesh, model, policy), torch.ones(2, WIDTH)
    _step(state, num_microbatches, inputs)
    ops.barrier(mesh.group("dp"), cause="measure")
    before = _sent_and_received()
    _step(state, num_microbatches, inputs)
    ops.barrier(mesh.group("dp"), cause="measure")
    sent, received = (after - start for after, start in zip(_sent_and_received(), before, strict=True))
    declared = declared_wire_bytes(state.engine.policy, state.engine.units, num_microbatches=num_microbatches)
    return declared, sent, received


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's tcp_info")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("policy", ["ddp", "zero1", "zero2", "zero3"])
def test_declared_bytes_are_the_sockets_bytes(ranks, policy: str, num_microbatches: int, world: int) -> None:
    for declared, sent, received in ranks.run(_wire, world, policy, num_microbatches):
        # Headers of messages and the step's one small reduction come on top.
        assert declared <= received <= 1.001 * declared
        assert sent == pytest.approx(declared, rel=0.001)
