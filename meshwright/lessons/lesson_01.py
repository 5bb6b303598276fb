"""Four collectives: what all-reduce, reduce-scatter, all-gather and all-to-all leave on every rank.

A collective is a promise about buffers, not about messages: each picture shows the blocks of every rank before and
after. All-reduce is a reduce-scatter and an all-gather; the ranks check that with real numbers. Who sends what to
whom is the algorithm's business (lesson 2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.comm import ops
from meshwright.exchange.catalogue import make_exchange
from meshwright.exchange.cost import formula
from meshwright.exchange.draw import before_and_after
from meshwright.exchange.program import Collective
from meshwright.lessons.parity import check_parity
from meshwright.lessons.pictures import bars
from meshwright.testing.ranks import RankPool

NUM_RANKS = 4
SHOWN: tuple[tuple[str, Collective], ...] = (
    ("ring", "all_reduce"),
    ("ring", "reduce_scatter"),
    ("ring", "all_gather"),
    ("pairwise", "all_to_all"),
)


def main() -> None:
    """Run the lesson."""
    pool = RankPool()
    print(
        f"1. Blocks of {NUM_RANKS} ranks before and after. b2 is block b of rank 2, Σb the sum of all ranks' b.\n"
    )
    for algorithm, collective in SHOWN:
        print(before_and_after(make_exchange(algorithm, collective, NUM_RANKS)) + "\n")
    print("2. The same on real ranks. Rank r starts with the blocks 10r + 0, 10r + 1, ...\n")
    results = pool.run(every_collective, NUM_RANKS)
    for name in results[0]:
        print(
            f"  {name:<16}" + "   ".join(f"rank {rank} {result[name]}" for rank, result in enumerate(results))
        )
    both = [result["all_reduce"] == result["scatter, gather"] for result in results]
    print(f"\n  all-reduce = reduce-scatter, then all-gather: {all(both)}")
    assert all(both)
    print("\n3. What a rank sends at least, as a part of the buffer S (the whole one, of P ranks):\n")
    sent = {str(collective): formula(by, collective, NUM_RANKS, 1.0).of_a_worker for by, collective in SHOWN}
    print(bars(sent, unit="S", digits=2))
    print("\n4. The law: gradients summed by these collectives train what one process trains.\n")
    print(check_parity(pool, "ddp", num_ranks=NUM_RANKS).line())
    print(check_parity(pool, "zero1", num_ranks=NUM_RANKS).line())
    pool.close()


def every_collective(mesh: Any) -> dict[str, list[int]]:
    """Results of the four collectives on this rank, one element a block."""
    group, size = mesh.group("dp"), mesh.world.size
    mine = 10.0 * mesh.rank + torch.arange(size, dtype=torch.float64)
    reduced, part = mine.clone(), torch.empty(1, dtype=torch.float64)
    ops.all_reduce(reduced, group, cause="lesson").wait()
    ops.reduce_scatter(part, mine, group, cause="lesson").wait()
    gathered, swapped, again = (torch.empty(size, dtype=torch.float64) for _ in range(3))
    ops.all_gather(gathered, mine[mesh.rank : mesh.rank + 1], group, cause="lesson").wait()
    ops.all_to_all(swapped, mine, group, cause="lesson").wait()
    ops.all_gather(again, part, group, cause="lesson").wait()
    return {
        "all_reduce": whole_numbers(reduced),
        "reduce_scatter": whole_numbers(part),
        "all_gather": whole_numbers(gathered),
        "all_to_all": whole_numbers(swapped),
        "scatter, gather": whole_numbers(again),
    }


def whole_numbers(values: Tensor) -> list[int]:
    """The elements as integers."""
    return [int(value) for value in values]
