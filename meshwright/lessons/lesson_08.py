"""Pipelines as pictures: who computes what when, how long ranks idle, and what they must keep meanwhile.

A model is cut into stages, a rank each, and a batch into micro-batches that follow each other through them. F is a
forward, B a backward; where backward is split, I is the gradient of the input, which the stage before waits for, and W
that of the weights, which nobody waits for. Pictures are schedules as plain data, timed on paper; then two ranks run.
"""

from __future__ import annotations

from meshwright.lessons.pictures import bars
from meshwright.lessons.relay import run_relay
from meshwright.schedule.action import Action, Schedule, read_programs
from meshwright.schedule.catalogue import make_schedule
from meshwright.schedule.check import peak_in_flight
from meshwright.schedule.check_lowered import problem_of_lowered
from meshwright.schedule.draw import as_text
from meshwright.schedule.lower import lower
from meshwright.schedule.replicas import replicas_of
from meshwright.schedule.searched import searched
from meshwright.schedule.timing import Durations, bubble_of, makespan
from meshwright.testing.ranks import RankPool

P, M = 4, 8


def main() -> None:
    """Run the lesson."""
    print("1. Layers T1 T2 on rank 0, T3 T4 on rank 1. With one micro-batch each rank idles half the time.")
    draw("serial", 2, 1)
    print("\n   Four micro-batches that follow each other: (P-1)/(M+P-1) = 1/5 idle.")
    draw("gpipe", 2, 4)
    print("\n2. The same bubble twice: GPipe keeps all activations, 1F1B only as many as there are ranks.")
    for name in ("gpipe", "1f1b"):
        assert abs(bubble_of(make_schedule(name, P, M), Durations.equal(P)) - (P - 1) / (M + P - 1)) < 1e-12
        draw(name)
    print("\n3. V smaller stages a rank: bubble over ideal time (P-1)/(V·M), for V times the messages.\n")
    print(bars({f"V = {v}": 100 * bubble_over_ideal(v) for v in (1, 2, 4)}, unit="%", digits=1))
    draw("interleaved", 2, 4)
    print("\n4. Zero bubble: W fills gaps. H2 idles at both ends, where a next step starts; V folds.")
    for name in ("zb-h1", "zb-h2", "zb-v", "dualpipe"):
        draw(name)
    print("\n5. What it costs: idle part of the step, and activations kept, in P-ths of the model.\n")
    for name in ("serial", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe"):
        schedule = make_schedule(name, P, M)
        idle = bubble_of(schedule, Durations.equal(schedule.num_stages))
        kept = max(peak_in_flight(schedule)) * P / schedule.num_stages
        print(f"  {name:<12} {idle:6.1%} idle, {kept:g} kept")
    print("\n6. The third stage takes twice as long: a search finds an order within activations kept.\n")
    slow = (1.0, 1.0, 2.0, 1.0)
    times = Durations(slow, slow, slow)
    found = {name: makespan(make_schedule(name, P, M), times) for name in ("gpipe", "1f1b", "zb-h1")}
    found |= {f"searched, keeps {k}": searched(P, M, times, limits=(k,) * P).seconds for k in (1, 2)}
    print(bars(found, unit="units"))
    print(
        "\n7. Micro-batches of 6 samples, stage 0 on 2 ranks, stage 1 on 3: who sends whom which samples.\n"
    )
    print(redistributed())
    print("\n8. An order that stands still: both ends of a border send first, and wait.\n")
    print(f"  {problem_of_lowered(naive(), 'blocking')}\n\n  One order of all messages never does; rank 0's:")
    right = lower(make_schedule("1f1b", 2, 2))
    print("  " + " ".join(map(str, right.programs[0])))
    print("\n9. Two ranks run it as drawn, with the gradients of one process; messages add time.\n")
    pool = RankPool()
    for name in ("gpipe", "1f1b", "zb-h1"):
        print(run_relay(pool, name).text(name))
    pool.close()


def draw(name: str, num_ranks: int = P, num_microbatches: int = M) -> None:
    """Print a picture."""
    print("\n" + as_text(make_schedule(name, num_ranks, num_microbatches)))


def bubble_over_ideal(chunks: int) -> float:
    """Idle time over the time of the work, interleaved; checked against the formula."""
    schedule, ideal = make_schedule("interleaved", P, M, num_chunks=chunks), 3 * M * chunks
    found = makespan(schedule, Durations.equal(P * chunks)) / ideal - 1
    assert abs(found - (P - 1) / (chunks * M)) < 1e-12
    return found


def redistributed() -> str:
    """A line a message of the micro-batch's activation."""
    schedule = make_schedule("gpipe", 2, 1)
    replicas = replicas_of(schedule, [[0, 1], [2, 3, 4]], samples=6)
    programs, parts = lower(schedule, replicas=replicas).programs, list(map(set, replicas.parts()))
    sends = [(r, a.peer) for r, line in enumerate(programs) for a in line if a.op == "send_activation"]
    return "\n".join(f"  rank {a} → rank {b}: samples {sorted(parts[a] & parts[b])}" for a, b in sends)


def naive() -> Schedule:
    """pytorch#172668: each rank sends what it made before it receives."""
    first, second = read_programs("0F0 0F1\n1F0 1B0")
    up, arrives = Action("send_gradient", 0, 0, 0), Action("receive_activation", 1, 0, 0)
    down, again = Action("send_activation", 1, 0, 1), Action("send_activation", 1, 1, 1)
    return Schedule("naive", 2, 2, ((0, 1),), ((first[0], down, first[1], again), (arrives, *second, up)))
