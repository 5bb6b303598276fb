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
from meshwright.layout.accounting import (
    copies_calls,
    copies_wire_bytes,
    declared_calls,
    declared_wire_bytes,
    server_wire_bytes,
)
from meshwright.layout.policy import find_policy
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.state import TrainState
from meshwright.training.step import no_samples, train_step
from tests.parity.harness import with_servers
from tests.sharding.harness import data_groups

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


def _state(mesh: Any, model: nn.Module, policy: str, copies: int = 1, **changes: Any) -> TrainState:
    row = dataclasses.replace(find_policy(policy), bucket_bytes=BUCKET_BYTES, **changes)
    engine = ShardingEngine(model, policy=row, groups=data_groups(mesh, copies), device=torch.device("cpu"))
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
    mesh: Any, policy: str, num_microbatches: int, changes: dict[str, Any]
) -> dict[str, Counter[str]]:
    """Counters of one step: declared, issued, what the issued ones lower to, and what torch saw."""
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
    state = _state(mesh, model, policy, **changes)
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
        index = int(event.cause.split()[-1]) if event.op == "reduce" else 0
        lowered += mesh.group("dp").transport.lowered(event.op, _event_bytes(event), index)
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
    for counts in ranks.run(_three_witnesses, world, policy, num_microbatches, {"keep_last": keep_last}):
        assert counts["issued"] == counts["declared"]
        assert counts["observed"] == counts["lowered"]
        if policy == "ddp":
            assert set(counts["observed"]) == {"all_reduce"}
        else:  # buckets below and above every threshold
            kinds = {"all_reduce", "all_to_all", "all_gather", "broadcast", "send", "receive"}
            assert set(counts["observed"]) == kinds


@pytest.mark.parametrize("policy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("ownership", ["flat", "whole"])
def test_shared_memory_issues_the_same_and_sends_nothing(ranks, policy: str, ownership: str) -> None:
    changes = {"ownership": ownership if policy != "ddp" else "flat"}
    for counts in ranks.run(_three_witnesses, 3, policy, 2, changes, transport="shm"):
        assert counts["issued"] == counts["declared"]
        assert counts["observed"] == counts["lowered"] == {}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("policy", ["zero1", "zero2", "zero3"])
def test_whole_owners_declare_what_they_issue(ranks, policy: str, world: int) -> None:
    for counts in ranks.run(_three_witnesses, world, policy, 2, {"ownership": "whole"}):
        assert counts["issued"] == counts["declared"]
        assert set(counts["issued"]) == {"reduce", "broadcast"}
        assert counts["observed"] == counts["lowered"]


def _by_axis(mesh: Any, policy: str, ownership: str) -> list[dict[str, int]]:
    """(declared, issued) calls among ranks of a copy and between copies, on 2 copies."""
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
    state = _state(mesh, model, policy, 2, ownership=ownership)
    _step(state, 2, torch.ones(2, INPUTS))
    mesh.log.reset_counters()
    _step(state, 2, torch.ones(2, INPUTS))
    issued = [
        {op: calls for (op, axis), calls in mesh.log.calls.items() if axis == name}
        for name in ("dp_shard", "dp_replicate", "dp")
    ]
    units, policy_row = state.engine.units, state.engine.policy
    declared = [
        dict(declared_calls(policy_row, units, num_microbatches=2)),
        dict(copies_calls(units, num_copies=2)),
    ]
    return [*declared, *issued]


@pytest.mark.parametrize("ownership", ["flat", "whole"])
@pytest.mark.parametrize("policy", ["zero1", "zero2", "zero3"])
def test_copies_declare_what_they_issue_on_each_axis(ranks, policy: str, ownership: str) -> None:
    for inside, between, issued_inside, issued_between, everywhere in ranks.run(
        _by_axis, 4, policy, ownership
    ):
        assert issued_inside == inside
        assert issued_between == between
        assert everywhere == {"all_reduce": 1}


def _connections() -> dict[int, tuple[int, int]]:
    """(sent, received) payload bytes that the kernel counted on each of this process's own TCP connections."""
    counts = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            descriptor = os.dup(int(entry.name))
        except OSError:  # the descriptor of this listing itself
            continue
        status = os.fstat(descriptor)
        if not stat.S_ISSOCK(status.st_mode):
            os.close(descriptor)
            continue
        with socket.socket(fileno=descriptor) as connection:
            if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                counts[status.st_ino] = struct.unpack_from("<QQ", raw, TCP_INFO_BYTES_ACKED)
    return counts


def _moved_since(before: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Bytes sent and received; what connections of an earlier test counted does not vanish as they close."""
    moved = [
        (sent - before.get(inode, (0, 0))[0], received - before.get(inode, (0, 0))[1])
        for inode, (sent, received) in _connections().items()
    ]
    return sum(sent for sent, _ in moved), sum(received for _, received in moved)


def _wire(
    mesh: Any, policy: str, num_microbatches: int, copies: int = 1, ownership: str = "flat"
) -> tuple[int, int, int]:
    """Bytes of one step on one rank: declared, sent, received."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    state, inputs = _state(mesh, model, policy, copies, ownership=ownership), torch.ones(2, WIDTH)
    _step(state, num_microbatches, inputs)
    ops.barrier(mesh.group("dp"), cause="measure")
    before = _connections()
    # The kernel counts what has arrived: no rank may send before all have looked.
    ops.barrier(mesh.group("dp"), cause="measure")
    _step(state, num_microbatches, inputs)
    ops.barrier(mesh.group("dp"), cause="measure")
    sent, received = _moved_since(before)
    # A rank that leaves closes its groups' connections, and the kernel's counts go with them.
    ops.barrier(mesh.group("dp"), cause="measure")
    engine = state.engine
    declared = declared_wire_bytes(engine.policy, engine.units, num_microbatches=num_microbatches)
    declared += copies_wire_bytes(engine.units, num_copies=copies, index=engine.owners.index)
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's tcp_info")
@pytest.mark.parametrize("policy", ["zero1", "zero3"])
def test_bytes_between_copies_are_the_sockets_bytes(ranks, policy: str) -> None:
    for declared, sent, received in ranks.run(_wire, 4, policy, 2, 2):
        assert declared <= received <= 1.001 * declared
        # Sent is what peers acknowledged so far, and they may still be about to.
        assert sent == pytest.approx(declared, rel=0.005)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's tcp_info")
@pytest.mark.parametrize(("policy", "copies", "world"), [("zero2", 1, 3), ("zero3", 1, 3), ("zero1", 2, 4)])
def test_bytes_of_whole_owners_are_the_sockets_bytes_over_all_ranks(
    ranks, policy: str, copies: int, world: int
) -> None:
    results = ranks.run(_wire, world, policy, 2, copies, "whole")
    declared, sent, received = (sum(column) for column in zip(*results, strict=True))
    assert declared - world <= received <= 1.001 * declared  # means are rounded down
    assert sent == pytest.approx(declared, rel=0.005)


def _server_step(mesh: Any, servers: int, num_microbatches: int) -> dict[str, Any]:
    """Calls and bytes of one step of one rank, declared, issued and counted by the kernel."""
    groups = with_servers(mesh, servers).data_groups()
    row = find_policy("parameter_server", bucket_bytes=BUCKET_BYTES)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    engine = ShardingEngine(model, policy=row, groups=groups, device=torch.device("cpu"))
    state = TrainState(engine, ShardedOptimizer(OptimizerSpec("sgd"), engine.shards))
    inputs, log = torch.ones(2, WIDTH), mesh.log

    def step() -> None:
        train_step(
            state,
            lambda _: inputs,
            loss=no_samples if groups.is_server else _loss,
            num_microbatches=num_microbatches,
            lr=1e-3,
            clip_norm=None,
        )
        ops.barrier(groups.all, cause="measure")

    step()
    before = _connections()
    ops.barrier(groups.all, cause="measure")
    log.reset_counters()
    step()
    moved = _moved_since(before)
    calls = {op: calls for (op, axis), calls in log.calls.items() if axis == "dp"}
    logged = tuple(log.bytes[op, "dp"] for op in ("reduce", "broadcast"))
    ops.barrier(groups.all, cause="measure")  # as above: no rank leaves before all have looked
    declared = declared_calls(row, engine.units, num_microbatches=num_microbatches)
    wire = server_wire_bytes(engine.units, num_workers=groups.num_workers, index=groups.all.index)
    whole = sum(bucket.nbytes for unit in engine.units for bucket in unit.buckets)
    return {
        "calls": calls,
        "declared": {**declared, "all_reduce": 1, "barrier": 1},
        "logged": logged,
        "wire": wire,
        "moved": moved,
        "whole": whole,
    }


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's tcp_info")
@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 2)])
def test_bytes_of_parameter_servers_are_the_sockets_bytes(ranks, workers: int, servers: int) -> None:
    results = ranks.run(_server_step, workers + servers, servers, 2)
    whole = results[0]["whole"]
    for result in results:
        assert result["calls"] == result["declared"]
        assert result["logged"] == (whole, whole)  # ranks log the same calls; who takes part is the program's
        for moved, declared in zip(result["moved"], result["wire"], strict=True):
            assert moved == pytest.approx(declared, rel=0.005)
    assert [result["wire"] for result in results[:workers]] == [(whole, whole)] * workers
    for direction in (0, 1):
        assert sum(result["wire"][direction] for result in results[workers:]) == workers * whole
