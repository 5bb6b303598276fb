"""Every algorithm over real ranks equals the native collective; sums have one order; a dead peer is an error."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace

import pytest
import torch

from meshwright.comm import ops
from meshwright.comm.mesh import Mesh
from meshwright.comm.ops import Group
from meshwright.comm.transports.exchange import Choice, ExchangeTransport
from meshwright.errors import WorkerError
from meshwright.exchange.catalogue import generate, make_exchange
from meshwright.exchange.cost import count
from meshwright.exchange.program import chunk_bounds
from meshwright.testing.ranks import RankError

SIZES = (0, 1, 7, 1_000_003)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
# Collective, algorithm, ranks a node.
CASES = (
    ("all_reduce", "ring", 1),
    ("all_reduce", "halving", 1),
    ("all_reduce", "tree", 1),
    ("all_reduce", "hierarchical", 2),
    ("reduce_scatter", "ring", 1),
    ("all_gather", "ring", 1),
    ("broadcast", "tree", 1),
    ("reduce", "tree", 1),
    ("all_to_all", "pairwise", 1),
)


class Counting:
    """A transport that counts the bytes it is asked to send."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self.sent = 0

    def send(self, tensor, index, tag):
        self.sent += tensor.numel() * tensor.element_size()
        return self._inner.send(tensor, index, tag)

    def __getattr__(self, name):
        return getattr(self._inner, name)


def with_algorithms(
    group: Group, algorithms: dict[str, str], ranks_per_node: int = 1
) -> tuple[Group, Counting]:
    counting = Counting(group.transport)
    if group.transport is None:  # one rank alone
        return group, counting
    transport = ExchangeTransport(counting, group.index, group.size, Choice(algorithms, ranks_per_node))
    return replace(group, transport=transport), counting


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 20, (numel,), generator=generator).to(dtype)


def folded(
    algorithm: str, num_ranks: int, ranks_per_node: int, numel: int, dtype: torch.dtype
) -> torch.Tensor:
    """The sum in the order in which the programs add: rank by rank in numpy-like steps, one chunk at a time."""
    made = make_exchange(algorithm, "all_reduce", num_ranks, ranks_per_node=ranks_per_node)
    bounds = chunk_bounds(numel, made.num_chunks)
    state = [values(rank, numel, dtype) for rank in range(num_ranks)]
    position = [0] * num_ranks
    wires: dict[tuple[int, int], list[torch.Tensor]] = {}
    posted: set[tuple[int, int]] = set()
    while any(position[r] < len(made.programs[r]) for r in range(num_ranks)):
        for rank, program in enumerate(made.programs):
            if position[rank] == len(program):
                continue
            step = program[position[rank]]
            if (rank, position[rank]) not in posted:
                posted.add((rank, position[rank]))
                for send in step.sends:
                    part = state[rank][bounds[send.span.first] : bounds[send.span.stop]].clone()
                    wires.setdefault((rank, send.peer), []).append(part)
            if all(wires.get((receive.peer, rank)) for receive in step.receives):
                for receive in step.receives:
                    part = wires[receive.peer, rank].pop(0)
                    target = state[rank][bounds[receive.span.first] : bounds[receive.span.stop]]
                    target.add_(part) if receive.adds else target.copy_(part)
                position[rank] += 1
    return state[0]


def _all_cases(mesh, sizes, dtypes) -> None:
    native, size, rank = mesh.group("dp"), mesh.world.size, mesh.rank
    for collective, algorithm, ranks_per_node in CASES:
        group, counting = with_algorithms(native, {collective: algorithm}, ranks_per_node)
        for numel in sizes:
            for dtype in dtypes:
                counting.sent = 0
                expected_bytes = _run(collective, group, native, numel, dtype, algorithm, ranks_per_node)
                assert counting.sent == expected_bytes, (collective, algorithm, numel, dtype)
    assert size == 1 or rank in range(size)


def _run(collective, group, native, numel, dtype, algorithm, ranks_per_node) -> int:
    """Compare with arithmetic, or bitwise with the fixed order; returns the bytes that this rank should have sent."""
    size, rank = group.size, group.index
    whole = numel * size
    where = (collective, algorithm, size, numel, dtype)
    if collective == "all_reduce":
        x = values(rank, numel, dtype)
        ops.all_reduce(x, group, cause="t").wait()
        assert torch.equal(x, folded(algorithm, size, ranks_per_node, numel, dtype)), where
        if not dtype.is_floating_point:
            y = values(rank, numel, dtype)
            ops.all_reduce(y, native, cause="t").wait()
            assert torch.equal(x, y), where
        whole = numel
    elif collective == "reduce_scatter":
        source = values(rank, whole, dtype)
        kept, part = source.clone(), torch.empty(numel, dtype=dtype)
        ops.reduce_scatter(part, source, group, cause="t").wait()
        assert torch.equal(source, kept), where  # a user's tensor is never changed
        ops.reduce_scatter(kept.view(size, -1)[rank], kept, group, cause="t").wait()  # in place
        assert torch.equal(part, kept.view(size, -1)[rank]), where
        exact = sum(values(r, whole, dtype).view(size, -1)[rank].double() for r in range(size))
        limit = 0.0 if not dtype.is_floating_point else 16 * torch.finfo(dtype).eps * size
        assert torch.allclose(part.double(), exact, rtol=limit, atol=limit), where
        return 2 * (size - 1) * numel * dtype.itemsize
    elif collective == "all_gather":
        out = torch.empty(whole, dtype=dtype)
        ops.all_gather(out, values(rank, numel, dtype), group, cause="t").wait()
        assert torch.equal(out, torch.cat([values(r, numel, dtype) for r in range(size)])), where
    elif collective == "reduce":
        x = values(rank, numel, dtype)
        ops.reduce(x, group, index=0, cause="t").wait()
        assert rank > 0 or torch.equal(x, folded("tree", size, 1, numel, dtype)), where
        whole = numel
    elif collective == "broadcast":
        sent = 0
        for root in {0, size - 1}:
            x = values(rank, numel, dtype)
            ops.broadcast(x, group, index=root, cause="t").wait()
            assert torch.equal(x, values(root, numel, dtype)), where
            sent += count(make_exchange(algorithm, collective, size, root=root), numel, dtype.itemsize).sent[
                rank
            ]
        return sent
    else:
        out = torch.empty(whole, dtype=dtype)
        ops.all_to_all(out, values(rank, whole, dtype), group, cause="t").wait()
        blocks = [values(r, whole, dtype).view(size, -1)[rank] for r in range(size)]
        assert torch.equal(out, torch.cat(blocks)), where
    made = make_exchange(algorithm, collective, size, ranks_per_node=ranks_per_node)
    return count(made, whole, dtype.itemsize).sent[rank]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_algorithm_equals_the_native_collective(ranks, size) -> None:
    ranks.run(_all_cases, size, (0, 1, 7, 1003), (torch.float32, torch.bfloat16, torch.int64))


@pytest.mark.parity
@pytest.mark.parametrize("size", range(1, 10))
def test_every_algorithm_size_and_dtype(ranks, size) -> None:
    ranks.run(_all_cases, size, SIZES, DTYPES, timeout=600)


def _repeats(mesh) -> None:
    group, _ = with_algorithms(mesh.group("dp"), {"all_reduce": "ring", "reduce_scatter": "ring"})
    first = None
    for _ in range(3):
        x = values(mesh.rank, 10_001, torch.float32)
        ops.all_reduce(x, group, cause="t").wait()
        assert first is None or torch.equal(first, x)
        first = x


def test_results_repeat_bit_by_bit(ranks) -> None:
    ranks.run(_repeats, 3)


def _delayed(mesh, iterations) -> None:
    """Collectives of all kinds in flight at once, ranks sleeping at random."""
    native, size, rank = mesh.group("dp"), mesh.world.size, mesh.rank
    chosen = {"all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring", "broadcast": "tree"}
    group, _ = with_algorithms(native, {**chosen, "all_to_all": "pairwise"})
    rng, shared = random.Random(rank), random.Random(1)
    for _ in range(iterations):
        n = shared.choice((1, 5, 97, 5000))
        x, part = torch.full((n,), float(rank + 1)), torch.empty(n)
        out, swapped = torch.empty(n * size), torch.empty(n * size)
        source = torch.arange(size, dtype=torch.float32).repeat_interleave(n) + rank
        handles = [ops.all_reduce(x, group, cause="a"), ops.reduce_scatter(part, source, group, cause="b")]
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.004)
        handles.append(ops.all_gather(out, torch.full((n,), float(rank)), group, cause="c"))
        handles.append(ops.all_to_all(swapped, source, group, cause="d"))
        for handle in rng.sample(handles, len(handles)):
            handle.wait()
        assert torch.equal(x, torch.full((n,), size * (size + 1) / 2))
        assert torch.equal(part, torch.full((n,), size * rank + size * (size - 1) / 2))
        assert torch.equal(out, torch.arange(size, dtype=torch.float32).repeat_interleave(n))
        assert torch.equal(swapped, (rank + torch.arange(size)).float().repeat_interleave(n))


def test_random_delays(ranks) -> None:
    ranks.run(_delayed, 4, 40)


@pytest.mark.parity
def test_a_thousand_iterations_under_random_delays_on_six_ranks(ranks) -> None:
    ranks.run(_delayed, 6, 1000, timeout=600)


def _peer_dies(mesh) -> str:
    group, _ = with_algorithms(mesh.group("dp"), {"all_reduce": "ring"})
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        ops.all_reduce(torch.zeros(1000), group, cause="reduce bucket 0").wait()
    assert time.monotonic() - started < 5
    assert caught.value.code == "E401"
    assert "all_reduce #0 of 1,000 float32 over dp (reduce bucket 0)" in caught.value.message
    raise RuntimeError("noticed")


def test_a_killed_rank_is_noticed_in_seconds(ranks) -> None:
    with pytest.raises(
        RankError, match=r"(?s)rank 0.*noticed.*rank 1. died with exit code -9.*rank 2.*noticed"
    ):
        ranks.run(_peer_dies, 3)


def _hosts_of_unequal_size(mesh) -> None:
    """Two ranks on the first host, one on the second: each launcher tells its ranks another local size."""
    world = replace(mesh.world, local_size=2 if mesh.rank < 2 else 1)
    bound = Mesh(mesh.spec, world, log=mesh.log, device=mesh.device, sync="hierarchical")
    x = torch.full((7,), float(mesh.rank))
    ops.all_reduce(x, bound.group("dp"), cause="t").wait()
    assert torch.equal(x, torch.full((7,), 3.0))


def test_ranks_agree_on_what_a_node_is(ranks) -> None:
    ranks.run(_hosts_of_unequal_size, 3, timeout=15)


def _lowered(mesh) -> None:
    group, _ = with_algorithms(mesh.group("dp"), {"all_reduce": "ring"})
    assert group.transport.lowered("all_reduce", 1000) == {"send": 4, "receive": 4}
    assert group.transport.lowered("barrier", 0) == {"barrier": 1}
    assert group.transport.name == "gloo, ring"


def test_lowered(ranks) -> None:
    ranks.run(_lowered, 3)


def test_a_rank_makes_only_its_own_program_of_thousands() -> None:
    made = generate("ring", "all_reduce", 4096)
    assert len(made.program(17)) == 2 * 4095
