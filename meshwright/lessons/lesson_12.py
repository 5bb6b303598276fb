"""Automatic partitioning: a planner in 50 lines, raced against the exact one.

A model is a chain of blocks; stages of neighbouring blocks run on one or more devices each, and a step is as
slow as the longest forward plus the longest backward. A table over (stages, blocks, devices) that keeps the
best plan of each state looks like the whole answer. It is not: of two plans of one state, the one that is
worse now may be better later.
"""

from __future__ import annotations

import random
from dataclasses import replace

from meshwright.lessons.pictures import bars
from meshwright.partitioning.chain import Block, chain_of, shares_of
from meshwright.partitioning.draw import as_text
from meshwright.partitioning.partition import partition_chain
from meshwright.partitioning.stage_costs import Group, Problem

Plan = tuple[tuple[int, int, int], ...]


def my_planner(forward: list[int], backward: list[int], stages: int, devices: int) -> tuple[float, Plan]:
    """(longest forward + longest backward, stages as (first, stop, devices)), by one state a table cell."""
    # (blocks, devices) -> (value, longest forward, longest backward, plan)
    table: dict[tuple[int, int], tuple[float, float, float, Plan]] = {(0, 0): (0.0, 0.0, 0.0, ())}
    for _ in range(stages):
        grown: dict[tuple[int, int], tuple[float, float, float, Plan]] = {}
        for (first, used), (_value, longest_f, longest_b, plan) in table.items():
            for stop in range(first + 1, len(forward) + 1):
                for q in range(1, devices - used + 1):
                    f = max(longest_f, sum(forward[first:stop]) / q)
                    b = max(longest_b, sum(backward[first:stop]) / q)
                    found = (f + b, f, b, (*plan, (first, stop, q)))
                    place = (stop, used + q)
                    if place not in grown or found < grown[place]:
                        grown[place] = found
        table = grown
    value, _, _, plan = table[len(forward), devices]
    return value, plan


def exact(forward: list[int], backward: list[int], stages: int, devices: int) -> Problem:
    """The same question for the exact planner."""
    chain = chain_of([Block(f, b) for f, b in zip(forward, backward, strict=True)])
    return Problem(shares_of(chain, devices), (Group(devices),), (stages, stages))


def main() -> None:
    """Run the lesson."""
    print("1. Blocks of forward 9 5 9 and backward 5 7 3, three stages, four devices.\n")
    forward, backward = [9, 5, 9], [5, 7, 3]
    value, plan = my_planner(forward, backward, 3, 4)
    best = partition_chain(exact(forward, backward, 3, 4))
    print(bars({"one plan a state": value, "exact": best.value}, unit="s"))
    print(f"\n   mine: {plan}\n\n{as_text(best, ['a', 'b', 'c'])}")
    assert (value, best.value, best.gap) == (16, 14, 0)
    print("\n2. The race: 200 random chains. How often is mine worse, and by how much?\n")
    rng, ratios = random.Random(0), []
    for _ in range(200):
        n, devices = rng.randint(3, 6), rng.randint(3, 6)
        forward, backward = ([rng.randint(1, 9) for _ in range(n)] for _ in range(2))
        mine, _ = my_planner(forward, backward, 3, devices)
        ratios.append(mine / partition_chain(exact(forward, backward, 3, devices)).value)
        assert ratios[-1] > 1 - 1e-12
    worse = sum(ratio > 1 + 1e-9 for ratio in ratios)
    print(f"   worse in {worse} of 200, at worst {max(ratios):.2f} times")
    assert worse
    print("\n3. Where backward is twice forward, one number is enough: never worse.\n")
    for _ in range(100):
        forward = [rng.randint(1, 9) for _ in range(5)]
        backward = [2 * f for f in forward]
        best = partition_chain(exact(forward, backward, 3, 5))
        assert abs(my_planner(forward, backward, 3, 5)[0] - best.value) < 1e-9
    print(
        "   100 of 100 equal\n\n4. Memory: the first block holds 10 of at most 10 bytes, so it stands alone.\n"
    )
    chain = chain_of([Block(t, 2 * t, m) for t, m in ((4, 10), (4, 1), (8, 1), (8, 1))])
    given = Problem(shares_of(chain, 4), (Group(4, memory_bytes=10),), (2, 2))
    names = ["embedding", "block 1", "block 2", "head"]
    for replicas in ("any", "pow2"):
        print(
            f"   replicas {replicas}\n{as_text(partition_chain(replace(given, replicas=replicas)), names)}\n"
        )
    print("5. On a real model: meshwright partition gpt2-124m --devices 4")
