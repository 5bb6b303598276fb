"""Pipelines simulated and measured: the step of each schedule, on 2 ranks with a core each and on 4 that share 2.

Stages are timed in steps of their own (CPU seconds of the rank, median over micro-batches), messages by ping pong; the
simulation has these numbers, the schedule and the number of cores, nothing of the measured step. Bars: within 8 % on 2
ranks, within 15 % on 4.

    python benchmarks/pipeline_simulated.py [--rounds 7] [--json FILE]
    python benchmarks/pipeline_simulated.py --tiny      a smoke run of seconds
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import WORKLOADS, Workload, launch, race
from pipeline import ours

from meshwright.schedule.timing import Durations
from meshwright.simulation.machinery import Machinery, Wire
from meshwright.simulation.timeline import simulate

SCHEDULES = ("serial", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe")
TIMED_STEPS = 4


def measured_durations(step: Any, executor: Any) -> Durations:
    """Seconds of each stage's computations, from all ranks; the first step is not counted."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    executor.clock = lambda action, start, end, cpu: found[action.op, action.stage].append(cpu)
    step()
    found.clear()
    start = time.process_time()
    for _ in range(TIMED_STEPS - 1):
        step()
    whole = time.process_time() - start
    executor.clock = None
    # Messages and Python between computations need a core too: each computation has its part of them.
    beside = (whole - sum(map(sum, found.values()))) / sum(map(len, found.values()))
    every: list[Any] = [None for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, (dict(found), beside))
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for one, more in every:
        for key, values in one.items():
            times[key] += [x + more for x in values]

    def of(op: str) -> tuple[float, ...]:
        stages = range(executor.schedule.num_stages)
        return tuple(statistics.median(times[op, stage]) if times[op, stage] else 0.0 for stage in stages)

    if executor.schedule.splits_backward:
        both = of("B")  # some schedules split a part of their backwards alone
        given, weights = of("I"), of("W")
        return Durations(
            of("F"),
            tuple(i or b / 2 for i, b in zip(given, both, strict=True)),
            tuple(w or b / 2 for w, b in zip(weights, both, strict=True)),
        )
    half = tuple(x / 2 for x in of("B"))
    return Durations(of("F"), half, half)


def measured_wire(numel: int) -> Wire:
    """Half of a round trip between the first two ranks: of one number, and what a whole message takes more."""
    rank = dist.get_rank()
    seconds = []
    for size in (1, numel):
        x, trips = torch.zeros(size), []
        for _ in range(30):
            dist.barrier()
            start = time.perf_counter()
            if rank == 0:
                dist.send(x, 1)
                dist.recv(x, 1)
            elif rank == 1:
                dist.recv(x, 0)
                dist.send(x, 0)
            trips.append((time.perf_counter() - start) / 2)
        seconds.append(statistics.median(trips))
    both = torch.tensor(seconds, dtype=torch.float64)
    dist.broadcast(both, 0)
    latency, whole = both.tolist()
    return Wire(latency, max(0.0, whole - latency))


def measured_sum(numel: int) -> float:
    """Seconds in which a rank adds `numel` numbers to those of another, half of them as the one that adds."""
    mine, coming = torch.ones(numel // 2), torch.ones(numel // 2)
    peer, seconds = dist.get_world_size() - 1 - dist.get_rank(), []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(2):
            sending = dist.isend(mine, peer)
            dist.recv(coming, peer)
            sending.wait()
        mine.add_(coming)
        seconds.append(time.perf_counter() - start)
    median = torch.tensor(statistics.median(seconds), dtype=torch.float64)
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return float(median)


def on_rank(rank: int, size: int, workload: Workload, options: argparse.Namespace) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if size > 2 else None
    sample = workload.batch(0)["tokens"]
    wire = measured_wire(sample.numel() // 8 * workload.config.dim)
    candidates, meshes, predicted, stages = {}, [], {}, {}
    for schedule in options.schedules:
        made = ours(rank, workload, schedule, "gloo")
        executor, engine = made.executor, made.engine
        durations = measured_durations(made.step, executor)
        candidates[schedule] = made.step
        meshes.append(made.mesh)
        seconds = simulate(executor.schedule, Machinery(durations, wire, cores=cores)).seconds
        if (
            len(executor.schedule.placement) > 1
        ):  # every stage is on two ranks, that add their gradients at the end
            seconds += measured_sum(sum(x.numel() for x in engine.model.parameters()))
        predicted[schedule] = 1e3 * seconds
        stages[schedule] = {
            "F": durations.forward,
            "I": durations.input_gradient,
            "W": durations.weight_gradient,
        }
    timings = race(candidates, rounds=options.rounds, inner=1, warmup=1)
    for mesh in meshes:
        with closing(mesh):
            pass
    return {
        "workload": workload.about,
        "ranks": size,
        "wire_us": (wire.latency * 1e6, wire.seconds * 1e6),
        "stage_seconds": stages,
        "measured_ms": {name: timing.median for name, timing in timings.items()},
        "predicted_ms": predicted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.rounds, options.schedules = 1, ["1f1b"]
    results = []
    for size in options.ranks:
        result = launch(on_rank, size, WORKLOADS["a"], options, pin=size == 2 and not options.tiny)
        results.append(result)
        print(f"{size} ranks, {result['workload']}")
        for name, measured in result["measured_ms"].items():
            predicted = result["predicted_ms"][name]
            error = predicted / measured - 1
            print(f"  {name:<12} {measured:8.1f} ms measured {predicted:8.1f} ms simulated {error:+7.1%}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
