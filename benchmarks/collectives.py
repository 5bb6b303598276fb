"""Collectives of every CPU transport, raced: torch's Gloo, our Gloo, shared memory through slots and in place.

All candidates of a size live in the same processes and are timed in turn, order rotating, a barrier before each, the
slowest rank counts, medians over rounds. Every rank writes its tensor anew before each timing, outside of it: what
peers read then lies in this rank's caches, as after a backward.

    python benchmarks/collectives.py                         2 ranks, 1 KB to 100 MB
    python benchmarks/collectives.py --ranks 4 --sizes 1K,1M --ops all_reduce,barrier
    python benchmarks/collectives.py --json > collectives.json
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import Timing, cpu_seconds, launch

from meshwright.comm.log import CommLog
from meshwright.comm.mesh import Mesh, World
from meshwright.comm.transports.base import Transport
from meshwright.mesh import MeshSpec

OPS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "all_to_all",
    "reduce",
    "ping_pong",
    "barrier",
    "memcpy",
)
# (what, op, size, candidate, compared with, at least this many times its speed)
BARS = (
    ("all-reduce 1 KB", "all_reduce", 1 << 10, "shm", "torch gloo", 50.0),
    ("broadcast 1 KB", "broadcast", 1 << 10, "shm", "torch gloo", 10.0),
    ("ping-pong 1 KB", "ping_pong", 1 << 10, "shm", "torch gloo", 4.0),
    ("all-reduce 25 MB, any tensor", "all_reduce", 25 << 20, "shm", "torch gloo", 3.5),
    ("all-reduce 100 MB, any tensor", "all_reduce", 100 << 20, "shm", "torch gloo", 3.5),
    ("all-reduce 25 MB, in place", "all_reduce", 25 << 20, "shm in place", "torch gloo", 5.0),
    ("all-reduce 100 MB, in place", "all_reduce", 100 << 20, "shm in place", "torch gloo", 5.0),
    ("reduce-scatter 25 MB, in place", "reduce_scatter", 25 << 20, "shm in place", "torch gloo", 10.0),
    ("reduce-scatter 100 MB, in place", "reduce_scatter", 100 << 20, "shm in place", "torch gloo", 10.0),
    ("all-reduce 100 MB, in place, against a copy", "all_reduce", 100 << 20, "shm in place", "memcpy", 1.0),
)
Call = Callable[[], object]


class Candidate:
    """The operations of one transport on tensors of one size."""

    def __init__(self, transport: Transport | None, rank: int, size: int, nbytes: int) -> None:
        self.transport, self.rank, self.size = transport, rank, size
        self.numel = max(size, nbytes // 4 // size * size)

    def allocate(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel)

    def calls(self) -> dict[str, Call]:
        """Operation to what runs it; tensors are this candidate's own."""
        self.x, self.y = self.allocate(self.numel), self.allocate(self.numel)
        self.part = torch.zeros(self.numel // self.size)
        t, own = self.transport, self.y.view(self.size, -1)[self.rank]
        assert t is not None
        return {
            "all_reduce": lambda: t.all_reduce(self.x).wait(),
            "reduce_scatter": lambda: t.reduce_scatter(self.part, self.x).wait(),
            "all_gather": lambda: t.all_gather(self.y, own).wait(),
            "broadcast": lambda: t.broadcast(self.x, 0).wait(),
            "all_to_all": lambda: t.all_to_all(self.y, self.x).wait(),
            "reduce": lambda: t.reduce(self.x, 0).wait(),
            "ping_pong": lambda: self.ping_pong(
                lambda peer: t.send(self.x, peer, 0).wait(), lambda peer: t.receive(self.x, peer, 0).wait()
            ),
            "barrier": lambda: t.barrier().wait(),
        }

    def ping_pong(self, send: Callable[[int], object], receive: Callable[[int], object]) -> None:
        """There and back between ranks 0 and 1."""
        if self.rank == 0:
            send(1)
            receive(1)
        elif self.rank == 1:
            receive(0)
            send(0)

    def refill(self) -> None:
        self.x.fill_(self.rank)
        self.y.fill_(self.rank)


class InPlace(Candidate):
    """Tensors in memory of the transport."""

    def allocate(self, numel: int) -> torch.Tensor:
        assert self.transport is not None
        memory = self.transport.allocate(numel, torch.float32)
        assert memory is not None
        return memory


class Torch(Candidate):
    """torch.distributed as it is."""

    def calls(self) -> dict[str, Call]:
        self.x, self.y = torch.zeros(self.numel), torch.zeros(self.numel)
        part, own = torch.zeros(self.numel // self.size), self.y.view(self.size, -1)[self.rank]
        return {
            "all_reduce": lambda: dist.all_reduce(self.x),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, self.x),
            "all_gather": lambda: dist.all_gather_into_tensor(self.y, own),
            "broadcast": lambda: dist.broadcast(self.x, 0),
            "all_to_all": lambda: dist.all_to_all_single(self.y, self.x),
            "reduce": lambda: dist.reduce(self.x, 0),
            "ping_pong": lambda: self.ping_pong(
                lambda peer: dist.send(self.x, peer), lambda peer: dist.recv(self.x, peer)
            ),
            "barrier": dist.barrier,
            "memcpy": lambda: self.y.copy_(self.x),
        }


def transport_of(name: Any, rank: int, world_size: int) -> Transport:
    mesh = Mesh(
        MeshSpec.of(dp_shard=world_size),
        World(rank=rank, size=world_size),
        log=CommLog(rank, world_size),
        device=torch.device("cpu"),
        transport=name,
    )
    transport = mesh.group("dp").transport
    assert transport is not None
    return transport


def run(
    rank: int, world_size: int, sizes: list[int], ops: list[str], rounds: int
) -> dict[tuple[str, int, str], Timing]:
    warnings.filterwarnings("ignore")
    gloo, shm = (transport_of(name, rank, world_size) for name in ("gloo", "shm"))
    timings: dict[tuple[str, int, str], Timing] = {}
    for nbytes in sizes:
        candidates = {
            "torch gloo": Torch(None, rank, world_size, nbytes),
            "gloo": Candidate(gloo, rank, world_size, nbytes),
            "shm": Candidate(shm, rank, world_size, nbytes),
            "shm in place": InPlace(shm, rank, world_size, nbytes),
        }
        entries = [
            (op, name, call)
            for name, candidate in candidates.items()
            for op, call in candidate.calls().items()
            if op in ops and not (op == "barrier" and name == "shm in place")
        ]
        for number in range(rounds):
            turn = number * len(entries) // rounds
            for op, name, call in entries[turn:] + entries[:turn]:
                inner = max(1, min(200, (1 << 21) // nbytes))
                label = "memcpy" if op == "memcpy" else name
                timing = timings.setdefault((op, nbytes, label), Timing())
                measure(call, candidates[name].refill, timing, inner if "shm" in name else -(-inner // 5))
    return timings


def measure(call: Call, refill: Call, timing: Timing, inner: int) -> None:
    refill()
    call()
    refill()
    gc.collect()
    gc.disable()
    dist.barrier()
    cpu, start = cpu_seconds(), time.perf_counter()
    for _ in range(inner):
        call()
    wall = torch.tensor([(time.perf_counter() - start) / inner], dtype=torch.float64)
    cpu = (cpu_seconds() - cpu) / inner
    gc.enable()
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    timing.wall.append(float(wall) * 1e3)
    timing.cpu.append(cpu * 1e3)


def rows_of(timings: dict[tuple[str, int, str], Timing]) -> list[dict[str, Any]]:
    rows = []
    for (op, nbytes, name), timing in timings.items():
        peer = timings.get((op, nbytes, "torch gloo"))
        rows.append(
            {
                "op": op,
                "bytes": nbytes,
                "candidate": name,
                "microseconds": round(timing.median * 1e3, 2),
                "cpu_microseconds": round(statistics.median(timing.cpu) * 1e3, 2),
                "times_torch_gloo": round(peer.median / timing.median, 2) if peer else None,
            }
        )
    return rows


def bars_of(timings: dict[tuple[str, int, str], Timing]) -> list[dict[str, Any]]:
    found = []
    for what, op, nbytes, name, peer, least in BARS:
        mine = timings.get((op, nbytes, name))
        other = timings.get((peer if peer == "memcpy" else op, nbytes, peer))
        if mine and other:
            ratio = other.median / mine.median
            found.append({"bar": what, "ratio": round(ratio, 2), "at_least": least, "ok": ratio >= least})
    return found


def size_of(text: str) -> int:
    units = {"K": 10, "M": 20}
    return int(text[:-1]) << units[text[-1]] if text[-1] in units else int(text)


def print_table(timings: dict[tuple[str, int, str], Timing], ranks: int) -> None:
    print(f"\n### {ranks} ranks; microseconds (times torch's Gloo; CPU microseconds of rank 0)\n")
    print("| op | bytes | torch gloo | gloo | shm | shm in place |\n|---|---|---|---|---|---|")
    by_op: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in rows_of(timings):
        by_op.setdefault((row["op"], row["bytes"]), {})[row["candidate"]] = row
    for (op, nbytes), row in by_op.items():
        cells = []
        for name in ("torch gloo", "gloo", "shm", "shm in place"):
            cell = row.get(name) or (row.get("memcpy") if name == "torch gloo" else None)
            ratio = f" ({cell['times_torch_gloo']}x; {cell['cpu_microseconds']:.0f})" if cell else ""
            cells.append(f"{cell['microseconds']:.1f}{ratio.replace('Nonex; ', '')}" if cell else "")
        print(f"| {op} | {nbytes:,} | {' | '.join(cells)} |")
    print()
    for bar in bars_of(timings):
        print(f"{'ok  ' if bar['ok'] else 'MISS'} {bar['bar']}: {bar['ratio']}x, bar {bar['at_least']}x")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", default="1K,64K,1M,25M,100M")
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--pin", action="store_true", help="give each rank a core of its own")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    sizes, ops = [size_of(text) for text in args.sizes.split(",")], args.ops.split(",")
    timings = launch(run, args.ranks, sizes, ops, args.rounds, pin=args.pin)
    if args.json:
        json.dump(
            {"ranks": args.ranks, "rows": rows_of(timings), "bars": bars_of(timings)}, sys.stdout, indent=1
        )
        print()
    else:
        print_table(timings, args.ranks)


if __name__ == "__main__":
    main()
