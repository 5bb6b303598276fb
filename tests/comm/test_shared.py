"""Shared memory: in place and through slots, bit by bit as Gloo; random delays; dead peers; who may not share."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import ops
from meshwright.comm.log import CommLog, ring_path
from meshwright.comm.mesh import Mesh
from meshwright.comm.transports import shared_connect, shared_messages
from meshwright.comm.transports.shared_barrier import start_of
from meshwright.comm.transports.shared_segment import NOWHERE, SEGMENT_BYTES, Arena, PeerArena
from meshwright.comm.transports.shared_slots import Route
from meshwright.comm.watchdog import RunFiles, Watchdog
from meshwright.errors import MeshwrightError, PlanError, WorkerError
from meshwright.layout.accounting import memory_bytes
from meshwright.testing.ranks import RankError
from tests.sharding.harness import accumulate, make_engine

pytestmark = pytest.mark.skipif(
    shared_connect.why_not_here() != "", reason="shared memory needs Linux on x86-64"
)
# Elements of float32 that a sender may be ahead.
RING_NUMEL = shared_messages.NUM_PIECES * shared_messages.PIECE_BYTES // 4
# Elements of float32: below and above what is read in place, what is divided, and one slot or ring.
SIZES = (1, 60, 6_000, 60_000, 900_000)


def _values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-50, 50, (numel,), generator=generator).to(dtype)


def _tensor(mesh: Any, values: torch.Tensor, *, resident: bool) -> torch.Tensor:
    if not resident:
        return values.clone()
    memory = mesh.group("dp").transport.allocate(values.numel(), values.dtype)
    return memory.copy_(values)


def _all_results(mesh: Any, numel: int, dtype: torch.dtype, resident: bool) -> dict[str, torch.Tensor]:
    """What every collective leaves on this rank."""
    group, size, rank = mesh.group("dp"), mesh.world.size, mesh.rank
    part, whole = _values(rank, numel, dtype), _values(rank, numel * size, dtype)
    results: dict[str, torch.Tensor] = {}

    def make(values: torch.Tensor) -> torch.Tensor:
        return _tensor(mesh, values, resident=resident)

    for root in range(size):
        x = results[f"reduce {root}"] = make(part)
        ops.reduce(x, group, index=root, cause="t").wait()
        if rank != root:
            del results[f"reduce {root}"]  # may be overwritten
        x = results[f"broadcast {root}"] = make(part)
        ops.broadcast(x, group, index=root, cause="t").wait()
    source, output = make(whole), torch.empty(numel, dtype=dtype)
    ops.reduce_scatter(output, source, group, cause="t").wait()
    results["reduce_scatter"] = output
    assert torch.equal(source, whole)
    own = results["reduce_scatter inside"] = source.view(size, -1)[rank]
    ops.reduce_scatter(own, source, group, cause="t").wait()
    gathered = results["all_gather"] = torch.empty(numel * size, dtype=dtype)
    ops.all_gather(gathered, make(part), group, cause="t").wait()
    gathered = results["all_gather inside"] = make(torch.zeros_like(whole))
    gathered.view(size, -1)[rank].copy_(part)
    ops.all_gather(gathered, gathered.view(size, -1)[rank], group, cause="t").wait()
    exchanged = results["all_to_all"] = torch.empty(numel * size, dtype=dtype)
    ops.all_to_all(exchanged, make(whole), group, cause="t").wait()
    if size == 2 or not dtype.is_floating_point:  # else Gloo's order of sums is its own
        results["all_reduce"] = make(part)
        ops.all_reduce(results["all_reduce"], group, cause="t").wait()
    return results


def _equals_gloo(mesh: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    gloo = Mesh(mesh.spec, mesh.world, log=mesh.log, device=mesh.device)
    assert gloo.group("dp").transport.name == "gloo"
    for numel in SIZES:
        for dtype in dtypes:
            expected = _all_results(gloo, numel, dtype, resident=False)
            for resident in (False, True):
                for name, tensor in _all_results(mesh, numel, dtype, resident=resident).items():
                    assert torch.equal(tensor, expected[name]), (name, numel, dtype, resident)


@pytest.mark.parametrize("size", [2, 3])
def test_equal_to_gloo_bit_by_bit(ranks, size: int) -> None:
    ranks.run(_equals_gloo, size, (torch.float32, torch.int64), transport="shm")


@pytest.mark.parity
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_equal_to_gloo_bit_by_bit_in_every_type(ranks, size: int) -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
    ranks.run(_equals_gloo, size, dtypes, transport="shm", timeout=600)


def _one_order(mesh: Any, resident: bool) -> list[torch.Tensor]:
    """All-reduces of floats on all ranks are the sum in rank order, however large and wherever the memory."""
    size, found = mesh.world.size, []
    for numel in SIZES:
        x = _tensor(mesh, _values(mesh.rank, numel, torch.float32), resident=resident)
        ops.all_reduce(x, mesh.group("dp"), cause="t").wait()
        expected = _values(0, numel, torch.float32)
        for rank in range(1, size):
            expected = expected + _values(rank, numel, torch.float32)
        assert torch.equal(x, expected), (numel, resident)
    return found


@pytest.mark.parametrize("resident", [False, True])
def test_all_reduce_adds_in_rank_order(ranks, resident: bool) -> None:
    ranks.run(_one_order, 4, resident, transport="shm")


def _routes(mesh: Any) -> list[int]:
    """Large tensors in private memory by both routes: two slots in turn, and all of them."""
    group, taken = mesh.group("dp"), []
    for number in range(5):
        x = torch.full((5_000_000,), float(mesh.rank + number))
        ops.all_reduce(x, group, cause="t").wait()
        assert torch.equal(x, torch.full((5_000_000,), 1.0 + 2 * number))
        taken.append(group.transport._slots.route)
    return taken


def test_ranks_agree_on_the_route_that_takes_less_time(ranks) -> None:
    first, second = ranks.run(_routes, 2, transport="shm")
    assert first == second
    assert {0, 1} <= set(first)


def test_the_route_is_the_faster_one_and_the_other_now_and_then() -> None:
    route = Route()
    assert route.choose() == 0
    route.note(0, 2.0)
    assert route.choose() == 1
    route.note(1, 1.0)
    chosen = [route.choose() for _ in range(32)]
    assert chosen.count(0) == 2
    route.note(1, 1000.0)  # interrupted
    assert route.choose() == 1
    for _ in range(8):
        route.note(1, 4.0)
    assert route.choose() == 0


def _mixed(mesh: Any) -> None:
    """Where only some ranks' tensors are in shared memory, all ranks go through slots."""
    group, numel = mesh.group("dp"), 100_000
    x = _tensor(mesh, torch.full((numel,), mesh.rank + 1.0), resident=mesh.rank == 1)
    ops.all_reduce(x, group, cause="t").wait()
    assert torch.equal(x, torch.full((numel,), 6.0))
    ops.broadcast(x.fill_(mesh.rank), group, index=1, cause="t").wait()  # only the root's counts
    assert torch.equal(x, torch.ones(numel))


def test_some_ranks_have_other_memory(ranks) -> None:
    ranks.run(_mixed, 3, transport="shm")


def _leaf(mesh: Any) -> None:
    x = torch.ones(10, requires_grad=True)
    ops.all_reduce(x, mesh.group("dp"), cause="t").wait()
    assert torch.equal(x, torch.full((10,), 2.0))
    assert x.grad_fn is None


def test_autograd_sees_nothing(ranks) -> None:
    ranks.run(_leaf, 2, transport="shm")


# Sends and receives.


def _sends_first(mesh: Any) -> None:
    """Everybody sends more than a ring holds, and waits for it, before anybody asks for anything; tags out of order."""
    group, size, rank = mesh.group("dp"), mesh.world.size, mesh.rank
    numel = RING_NUMEL + 13
    others = [peer for peer in range(size) if peer != rank]
    sent = [
        ops.send(torch.full((numel + tag,), 10.0 * rank + tag), group, index=peer, tag=tag, cause="t")
        for peer in others
        for tag in range(2)
    ]
    for handle in sent:
        handle.wait()
    for tag in (1, 0):
        for peer in others:
            x = torch.empty(numel + tag)
            ops.receive(x, group, index=peer, tag=tag, cause="t").wait()
            assert torch.equal(x, torch.full((numel + tag,), 10.0 * peer + tag))


def test_both_may_send_first(ranks) -> None:
    ranks.run(_sends_first, 3, transport="shm")


def _message_behind_a_collective(mesh: Any) -> None:
    """A message moves on while its receiver is in a collective that its sender comes to later."""
    group, x = mesh.group("dp"), torch.full((RING_NUMEL + 1,), float(mesh.rank))
    if mesh.rank == 0:
        ops.send(x, group, index=1, cause="t").wait()
        ops.all_reduce(torch.ones(10), group, cause="t").wait()
    else:
        handle = ops.receive(x, group, index=0, cause="t")
        ops.all_reduce(torch.ones(10), group, cause="t").wait()
        handle.wait()
        assert torch.equal(x, torch.zeros(RING_NUMEL + 1))


def test_messages_move_while_a_collective_waits(ranks) -> None:
    ranks.run(_message_behind_a_collective, 2, transport="shm")


def _wrong_length(mesh: Any) -> None:
    group = mesh.group("dp")
    if mesh.rank == 0:
        ops.send(torch.ones(10), group, index=1, cause="t").wait()
    else:
        with pytest.raises(WorkerError, match="has another length than the tensor for it: 40 and 44 bytes"):
            ops.receive(torch.ones(11), group, index=0, cause="t").wait()
    ops.barrier(group, cause="t")


def test_a_message_of_another_length_is_an_error(ranks) -> None:
    ranks.run(_wrong_length, 2, transport="shm")


# Random operations under random delays.


class _Storm:
    """Random operations, the same ones on every rank, with exact integer values; this rank sleeps now and then."""

    def __init__(self, mesh: Any, seed: int) -> None:
        self.mesh, self.group = mesh, mesh.group("dp")
        self.size, self.rank = mesh.world.size, mesh.rank
        self.common, self.own = random.Random(seed), random.Random(1000 * seed + mesh.rank)
        self.memory = [self.group.transport.allocate(400_000, torch.float32) for _ in range(2)]
        self.waiting: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def fill(self, numel: int, values: torch.Tensor) -> torch.Tensor:
        """`values` repeated to `numel`, in memory that the ranks draw alike or each for itself."""
        place = self.common.choice(("private", "resident", "mixed"))
        if place == "mixed":
            place = self.own.choice(("private", "resident"))
        if place == "private":
            return values.repeat(-(-numel // len(values)))[:numel].contiguous()
        start = self.own.randrange(0, 1000)
        x = self.own.choice(self.memory)[start : start + numel]
        return x.copy_(values.repeat(-(-numel // len(values)))[:numel])

    def pattern(self, rank: int) -> torch.Tensor:
        return (torch.arange(97) * (rank + 3) % 101).float()

    def step(self) -> None:
        if self.own.random() < 0.1:
            time.sleep(self.own.random() * 0.003)
        op = self.common.choice(OPERATIONS)
        numel = self.common.choice((1, 3, 97, 5_000, 40_000, 300_000 // self.size))
        whole = [
            self.pattern(r).repeat(-(-numel * self.size // 97))[: numel * self.size] for r in range(self.size)
        ]
        getattr(self, op)(numel, whole)

    def all_reduce(self, numel: int, whole: list[torch.Tensor]) -> None:
        x = self.fill(numel, whole[self.rank][:numel])
        ops.all_reduce(x, self.group, cause="t").wait()
        assert torch.equal(x, sum(w[:numel] for w in whole))

    def reduce(self, numel: int, whole: list[torch.Tensor]) -> None:
        x, root = self.fill(numel, whole[self.rank][:numel]), self.common.randrange(self.size)
        ops.reduce(x, self.group, index=root, cause="t").wait()
        assert self.rank != root or torch.equal(x, sum(w[:numel] for w in whole))

    def broadcast(self, numel: int, whole: list[torch.Tensor]) -> None:
        x, root = self.fill(numel, whole[self.rank][:numel]), self.common.randrange(self.size)
        ops.broadcast(x, self.group, index=root, cause="t").wait()
        assert torch.equal(x, whole[root][:numel])

    def reduce_scatter(self, numel: int, whole: list[torch.Tensor]) -> None:
        source = self.fill(numel * self.size, whole[self.rank])
        inside = self.common.random() < 0.5
        x = source.view(self.size, -1)[self.rank] if inside else torch.empty(numel)
        ops.reduce_scatter(x, source, self.group, cause="t").wait()
        assert torch.equal(x, sum(w.view(self.size, -1)[self.rank] for w in whole))

    def all_gather(self, numel: int, whole: list[torch.Tensor]) -> None:
        x = torch.empty(numel * self.size)
        ops.all_gather(x, self.fill(numel, whole[self.rank][:numel]), self.group, cause="t").wait()
        assert torch.equal(x, torch.cat([w[:numel] for w in whole]))

    def all_to_all(self, numel: int, whole: list[torch.Tensor]) -> None:
        x = torch.empty(numel * self.size)
        ops.all_to_all(x, self.fill(numel * self.size, whole[self.rank]), self.group, cause="t").wait()
        assert torch.equal(x, torch.cat([w.view(self.size, -1)[self.rank] for w in whole]))

    def barrier(self, _numel: int, _whole: list[torch.Tensor]) -> None:
        ops.barrier(self.group, cause="t")

    def messages(self, numel: int, whole: list[torch.Tensor]) -> None:
        """A ring of messages; some are waited for only after later operations."""
        tag, right, left = self.common.randrange(3), (self.rank + 1) % self.size, (self.rank - 1) % self.size
        arrived = torch.empty(numel)
        receive = ops.receive(arrived, self.group, index=left, tag=tag, cause="t")
        send = ops.send(whole[self.rank][:numel].clone(), self.group, index=right, tag=tag, cause="t")
        self.waiting += [(send, arrived, arrived), (receive, arrived, whole[left][:numel])]
        if len(self.waiting) > 8 or self.own.random() < 0.5:
            self.finish()

    def finish(self) -> None:
        self.own.shuffle(self.waiting)
        for handle, _, _ in self.waiting:
            handle.wait()
        for _, arrived, expected in self.waiting:
            assert torch.equal(arrived, expected)
        self.waiting = []


OPERATIONS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "barrier",
    "messages",
)


def _storm(mesh: Any, num_operations: int, seed: int) -> None:
    storm = _Storm(mesh, seed)
    for _ in range(num_operations):
        storm.step()
    storm.finish()


@pytest.mark.parametrize(("size", "num_operations"), [(2, 200), (3, 200), (6, 100)])
def test_random_operations_under_random_delays(ranks, size: int, num_operations: int) -> None:
    ranks.run(_storm, size, num_operations, 1, transport="shm")


@pytest.mark.parity
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_ten_thousand_random_operations(ranks, size: int) -> None:
    for seed in range(2, 4):
        ranks.run(_storm, size, 1000, seed, transport="shm", timeout=600)


# Ranks that die, leave, or go astray.


def _calls(mesh: Any, resident: bool) -> dict[str, Callable[[], None]]:
    """Operations that take several barriers or pieces."""
    group, size, rank = mesh.group("dp"), mesh.world.size, mesh.rank
    x = _tensor(mesh, torch.ones(1_200_000), resident=resident)
    part = _tensor(mesh, torch.ones(1_200_000 // size), resident=resident)
    message = torch.ones(RING_NUMEL + 1)
    return {
        "all_reduce": lambda: ops.all_reduce(x, group, cause="t").wait(),
        "reduce": lambda: ops.reduce(x, group, index=0, cause="t").wait(),
        "reduce_scatter": lambda: ops.reduce_scatter(part, x, group, cause="t").wait(),
        "all_gather": lambda: ops.all_gather(x, part, group, cause="t").wait(),
        "broadcast": lambda: ops.broadcast(x, group, index=1, cause="t").wait(),
        "all_to_all": lambda: ops.all_to_all(x.clone(), x, group, cause="t").wait(),
        "barrier": lambda: ops.barrier(group, cause="t"),
        "send": lambda: ops.send(message, group, index=1 - min(rank, 1), cause="t").wait(),
        "receive": lambda: ops.receive(message, group, index=1 - min(rank, 1), cause="t").wait(),
    }


def _repeat(call: Callable[[], None], times: int) -> None:
    for _ in range(times):
        call()


def _peer_dies(mesh: Any, op: str, resident: bool, moment: int) -> None:
    transport = mesh.group("dp").transport
    call = _calls(mesh, resident)[op]
    if mesh.rank == 1:
        meet, come = transport._barrier.meet, 0

        def meet_or_die(number: int) -> None:
            nonlocal come
            come += 1
            if come > moment:
                os.kill(os.getpid(), signal.SIGKILL)
            meet(number)

        transport._barrier.meet = meet_or_die
        if op in ("send", "receive"):  # the others wait for it in vain
            os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        _repeat(call, moment + 1)
    assert time.monotonic() - started < 5
    assert caught.value.code == "E401"
    assert "lost its peers in " + op in caught.value.message
    assert "rank 1" in caught.value.message
    raise RuntimeError("noticed")


@pytest.mark.parametrize(("resident", "moment"), [(False, 0), (False, 1), (True, 1)])
@pytest.mark.parametrize("op", ["all_reduce", "broadcast"])
def test_a_killed_rank_is_noticed_in_seconds(ranks, op: str, resident: bool, moment: int) -> None:
    _kill_inside(ranks, op, resident, moment)


@pytest.mark.parametrize("op", ["send", "receive"])
def test_a_killed_rank_is_noticed_by_messages(ranks, op: str) -> None:
    _kill_inside(ranks, op, False, 0, size=2)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("resident", "moment"), [(False, 0), (False, 1), (False, 2), (True, 0), (True, 1), (True, 2)]
)
@pytest.mark.parametrize(
    "op", ["all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier"]
)
def test_a_killed_rank_is_noticed_inside_every_operation(ranks, op: str, resident: bool, moment: int) -> None:
    _kill_inside(ranks, op, resident, moment)


def _kill_inside(ranks: Any, op: str, resident: bool, moment: int, size: int = 3) -> None:
    before = set(Path("/dev/shm").iterdir())
    with pytest.raises(RankError) as caught:
        ranks.run(_peer_dies, size, op, resident, moment, transport="shm")
    assert "[rank 1] died with exit code -9" in str(caught.value)
    assert str(caught.value).count("noticed") >= size - 1
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "meshwright" in path.name]


def _peer_leaves(mesh: Any) -> str:
    if mesh.rank == 1:
        raise RuntimeError("its own fault")
    with pytest.raises(
        WorkerError, match=r"E401 rank 0 lost its peers in all_reduce.*rank 1 has left"
    ) as caught:
        ops.all_reduce(torch.zeros(10), mesh.group("dp"), cause="t").wait()
    raise RuntimeError(f"noticed {caught.value.code}")


def test_a_rank_that_raised_is_noticed(ranks) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 0.*noticed E401.*rank 1.*its own fault"):
        ranks.run(_peer_leaves, 2, transport="shm")
    assert time.monotonic() - started < 20


def _astray(mesh: Any, folder: Path) -> tuple[str, str]:
    """Ranks in different calls wait, as over Gloo, until the watchdog names them."""
    mesh = _with_ring(mesh, folder)
    found = []
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the watchdog asks a laggard for its stack

    def on_stall(finding: Any) -> None:
        found.append(finding)
        mesh.close()

    with Watchdog(mesh.log, limit_seconds=1, folder=folder, world_size=2, on_stall=on_stall):
        with pytest.raises(WorkerError, match="has left"):
            ops.all_reduce(torch.zeros(10 + mesh.rank), mesh.group("dp"), cause=f"of {mesh.rank}").wait()
        deadline = time.monotonic() + 10
        while not found and time.monotonic() < deadline:
            time.sleep(0.05)
    # Not before the other's watchdog has ended too: its signal would end this process.
    (folder / f"ended {mesh.rank}").touch()
    while not (folder / f"ended {1 - mesh.rank}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    signal.signal(signal.SIGUSR1, before)
    return found[0].code if found else "", found[0].message if found else ""


def _with_ring(mesh: Any, folder: Path) -> Any:
    log = CommLog(mesh.rank, mesh.world.size, ring_path(folder / "events", mesh.rank))
    return Mesh(mesh.spec, mesh.world, log=log, device=mesh.device, transport="shm")


def test_ranks_in_different_calls_wait_for_the_watchdog(ranks, tmp_path) -> None:
    RunFiles(tmp_path).clear()
    found = [result for result in ranks.run(_astray, 2, tmp_path) if result[0]]
    assert found
    assert found[0][0] == "E404"
    assert "rank 0 issued all_reduce of 10 float32 (of 0), rank 1 issued all_reduce of 11" in found[0][1]


def test_a_process_that_has_ended_has_no_start() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 30
    while start_of(child.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert start_of(child.pid) is None  # it is a zombie: nobody has waited for it
    child.wait()
    assert start_of(os.getpid()) is not None


# Who may not share memory.


def _bound(mesh: Any, transport: str) -> Mesh:
    return Mesh(mesh.spec, mesh.world, log=mesh.log, device=mesh.device, transport=transport)


def _attempts(mesh: Any, change: Callable[[pytest.MonkeyPatch], None] | None) -> tuple[str, list[str], str]:
    """With something amiss on rank 1: what `auto` takes, what it says, and what `shm` raises."""
    with pytest.MonkeyPatch.context() as patch:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if mesh.rank == 1:
            if change is None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
            else:
                change(patch)
        try:
            bound = _bound(mesh, "auto")
            x = torch.ones(3)
            ops.all_reduce(x, bound.group("dp"), cause="t").wait()
            assert torch.equal(x, torch.full((3,), 2.0))
            with pytest.raises(MeshwrightError) as caught:
                _bound(mesh, "shm")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return bound.group("dp").transport.name, bound.warnings, str(caught.value)


def _refuse_to_open(*_: object) -> None:
    raise PermissionError("not permitted")


@pytest.mark.parametrize(
    ("change", "errors", "warning"),
    [
        (
            None,
            (r"E224.*rank 1: no shared memory of [\d,]+ bytes to be had: .*File too large", "E407 no shared"),
            "W401",
        ),
        (
            lambda patch: patch.setattr(shared_connect, "open_segment", _refuse_to_open),
            (
                "E224.*rank 1: memory of a peer cannot be opened: not permitted",
                "E224.*rank 1: memory of a peer",
            ),
            "W401",
        ),
        (
            lambda patch: patch.setattr(shared_connect.platform, "machine", lambda: "aarch64"),
            (
                "E224.*needs the memory order of x86-64, and this is aarch64",
                "E224.*rank 1: shared memory without",
            ),
            "W401",
        ),
        (
            lambda patch: patch.setattr(shared_connect, "_host_name", lambda: "another"),
            ("E224.*ranks 0, 1 run on several hosts. Set plan.transport=", "E224.*several hosts"),
            "",
        ),
    ],
    ids=["no memory", "forbidden", "no fence", "several hosts"],
)
def test_ranks_that_cannot_share_take_gloo_or_refuse(ranks, change: Any, errors: Any, warning: str) -> None:
    for error, (name, warnings, raised) in zip(errors, ranks.run(_attempts, 2, change), strict=True):
        assert name == "gloo"
        assert [text[:4] for text in warnings] == ([warning] if warning else [])
        assert re.search(error, raised), raised


@pytest.mark.parametrize(("transport", "device"), [("nccl", "cpu"), ("gloo", "cuda"), ("shm", "cuda")])
def test_a_transport_of_another_device_is_refused(transport: Any, device: str) -> None:
    from meshwright.testing.ranks import local_mesh

    mesh = local_mesh()
    with pytest.raises(PlanError, match=f'E224 plan.transport = "{transport}" carries nothing between'):
        Mesh(mesh.spec, mesh.world, log=mesh.log, device=torch.device(device), transport=transport)


# Memory.


def test_an_arena_hands_out_zeros_and_gives_segments_back() -> None:
    arena = Arena(5)
    peer = PeerArena(os.getpid(), Arena(6))
    first, second = arena.allocate(1000, torch.float32), arena.allocate(3, torch.int64)
    assert first.untyped_storage().nbytes() == 4000  # its own bytes, not the segment's
    assert not first.any()
    first.fill_(7)
    second.fill_(5)
    places = [arena.find(first), arena.find(second), arena.find(first[10:])]
    assert places[0].serial == places[1].serial == 1
    assert places[2] == replace(places[0], offset=40)
    seen = peer.view(places[2], arena.freed, numel=990, dtype=torch.float32)
    assert torch.equal(seen, torch.full((990,), 7.0))
    seen[0] = 8
    assert first[10] == 8
    assert arena.find(torch.ones(3)) == NOWHERE
    assert arena.allocate(0, torch.float32).numel() == 0
    del first, second
    assert arena.freed == 1
    descriptors = set(os.listdir("/proc/self/fd"))
    large = arena.allocate(SEGMENT_BYTES, torch.uint8)
    assert arena.find(large).serial == 2
    assert peer.view(arena.find(large), arena.freed, numel=5, dtype=torch.uint8).tolist() == [0] * 5
    del large, seen
    last = arena.allocate(1, torch.int64)
    peer.view(arena.find(last), arena.freed, numel=1, dtype=torch.int64)
    del last
    assert arena.freed == 3
    assert len(set(os.listdir("/proc/self/fd")) - descriptors) <= 1  # the peer's newest mapping


def _common(mesh: Any, numel: int) -> None:
    """One memory for all: gathers and broadcasts inside it copy nothing, and agree on when it may be read."""
    group, size, rank = mesh.group("dp"), mesh.world.size, mesh.rank
    whole = group.transport.allocate_common(numel * size, torch.float32)
    assert not whole.any()
    ops.barrier(group, cause="all have looked")
    for round_number in range(3):
        own = whole.view(size, -1)[rank]
        own.fill_(10.0 * round_number + rank)
        ops.all_gather(whole, own, group, cause="t").wait()
        expected = 10.0 * round_number + torch.arange(size).repeat_interleave(numel)
        assert torch.equal(whole, expected)
        private = torch.empty_like(whole)
        ops.all_gather(private, own, group, cause="t").wait()
        assert torch.equal(private, expected)
        for owner in range(size):
            ops.broadcast(whole.view(size, -1)[owner], group, index=owner, cause="t").wait()
        assert torch.equal(whole, expected)
        total = private.clone()
        ops.all_reduce(total, group, cause="nobody reads any more").wait()
        assert torch.equal(total, size * expected)
    assert group.transport.allocate_common(0, torch.float32).numel() == 0


@pytest.mark.parametrize("numel", [7, 60_000])
def test_memory_in_common(ranks, numel: int) -> None:
    ranks.run(_common, 3, numel, transport="shm")


def _engine_memory(mesh: Any, policy: str) -> tuple[dict[str, int], list[bool], list[torch.Tensor]]:
    """What an engine holds, whether what its collectives read is shared, and its gradients after a step."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 200))
    engine = make_engine(mesh, model, policy, copies=1 if policy == "ddp" else 2)
    accumulate(
        engine, lambda model, rank, _: model(torch.ones(2, 200) * (rank + 1)).square().sum(), mesh.rank
    )
    read = [memory.weight_shard for memory in engine.memories if policy == "zero3"]
    read += [memory.gradients for memory in engine.memories if memory.gradients is not None]
    read += [memory.gradient_shard for memory in engine.memories]
    read += [b for pool in engine._gradient_pools.values() for b in pool.buffers]
    held = engine.storage_bytes()
    predicted = memory_bytes(engine.policy, engine.units, gathers_in_place=engine.gathers_in_place)
    assert held["weights"] + held["weight_shards"] == predicted.weights + predicted.weight_shards
    del held["communication"]
    arena = getattr(engine.group.transport, "_arena", None)
    return (
        held,
        [arena is not None and arena.find(x) != NOWHERE for x in read],
        [s.gradient for s in engine.shards],
    )


@pytest.mark.parametrize("policy", ["ddp", "zero1", "zero2", "zero3"])
def test_buffers_of_the_engine_are_shared_and_as_large_as_elsewhere(ranks, policy: str) -> None:
    over_gloo = ranks.run(_engine_memory, 4, policy)
    over_shm = ranks.run(_engine_memory, 4, policy, transport="shm")
    for (held, shared, gradients), (expected, _, same) in zip(over_shm, over_gloo, strict=True):
        assert held == expected | ({"weights": 0} if policy == "zero3" else {})  # gathered where they are
        assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(gradients, same, strict=True))
        assert shared
        assert all(shared)
