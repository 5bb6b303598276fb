"""The ring: an all-reduce in which nobody sends more than twice the buffer, however many ranks there are.

The buffer is cut into one chunk a rank. In the first half every rank adds what its left neighbour sends and passes a
chunk on, so that after N - 1 steps each rank has the sum of one chunk; in the second half the sums travel around once.
2(N - 1) messages of S/N bytes: 2(N - 1)/N·S, less than 2S. A tree needs fewer steps and sends whole buffers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import ops
from meshwright.comm.transports.base import Transport, Work
from meshwright.comm.transports.exchange import Choice, ExchangeTransport
from meshwright.exchange.catalogue import make_exchange
from meshwright.exchange.cost import formula
from meshwright.exchange.draw import step_by_step
from meshwright.lessons.parity import check_parity
from meshwright.lessons.pictures import bars
from meshwright.presets.machines import Link
from meshwright.testing.ranks import RankPool

NUMEL = 8 * 9 * 5 * 7  # divides by 2 to 8 ranks


def main() -> None:
    """Run the lesson."""
    pool = RankPool()
    print("1. Three ranks, step by step. +c: chunk c is added; c: the sum is stored.\n")
    print(step_by_step(make_exchange("ring", "all_reduce", 3)))
    print(
        "\n2. Bytes that a rank sends, as a part of the buffer S: counted on real ranks up to 8, then the formula.\n"
    )
    counted = {n: pool.run(sent_by_a_ring, n)[0] / (4 * NUMEL) for n in (2, 4, 8)}
    for n, part in counted.items():
        assert part == formula("ring", "all_reduce", n, 1.0).of_a_worker
    stated = {n: formula("ring", "all_reduce", n, 1.0).of_a_worker for n in (16, 32, 64)}
    print(bars({f"{n} ranks": part for n, part in {**counted, **stated}.items()}, unit="S", digits=3))
    print(
        "\n3. Time of 64 ranks, each link 10 us and 25 GB/s: steps cost a small buffer, bytes a large one.\n"
    )
    link = Link(latency_seconds=10e-6, bandwidth_bytes_per_second=25e9)
    for nbytes in (1 << 10, 1 << 20, 1 << 30):
        times = {
            name: 1e3 * formula(name, "all_reduce", 64, nbytes).seconds(link)
            for name in ("ring", "halving", "tree")
        }
        print(f"  {nbytes:,} bytes\n" + bars(times, unit="ms", digits=3))
    print("\n4. Sums have one order, so a ring repeats bit by bit; and the law:\n")
    print(f"  three runs on 4 ranks, same bits: {all(pool.run(repeats, 4))}")
    print(check_parity(pool, "ddp", num_ranks=4).line())
    pool.close()


class Counting:
    """A transport that counts the bytes of its messages."""

    def __init__(self, inner: Transport) -> None:
        self._inner, self.name, self.sent = inner, inner.name, 0

    def send(self, tensor: Tensor, index: int, tag: int) -> Work:
        """See `Transport`."""
        self.sent += tensor.numel() * tensor.element_size()
        return self._inner.send(tensor, index, tag)

    def receive(self, tensor: Tensor, index: int, tag: int) -> Work:
        """See `Transport`."""
        return self._inner.receive(tensor, index, tag)


def all_reduce_by_ring(mesh: Any, tensor: Tensor) -> int:
    """Sum `tensor` over the ranks by a ring of messages; bytes that this rank sent."""
    group = mesh.group("dp")
    counting: Any = Counting(group.transport)
    transport = ExchangeTransport(counting, group.index, group.size, Choice({"all_reduce": "ring"}))
    ops.all_reduce(tensor, replace(group, transport=transport), cause="lesson").wait()
    return counting.sent


def sent_by_a_ring(mesh: Any) -> int:
    """Bytes that this rank sends to sum a float32 buffer; the sum is checked."""
    tensor = torch.full((NUMEL,), float(mesh.rank))
    sent = all_reduce_by_ring(mesh, tensor)
    assert torch.equal(tensor, torch.full((NUMEL,), float(sum(range(mesh.world.size)))))
    return sent


def repeats(mesh: Any) -> bool:
    """Whether the same random values give the same bits three times."""
    values = torch.randn(1003, generator=torch.Generator().manual_seed(mesh.rank))
    results = [values.clone() for _ in range(3)]
    for result in results:
        all_reduce_by_ring(mesh, result)
    return all(torch.equal(results[0], result) for result in results)
