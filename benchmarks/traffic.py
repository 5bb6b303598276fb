"""Bytes of one gradient sum through the busiest rank: ring, one parameter server, and servers that share the keys.

Up to 8 workers and their servers real ranks run the algorithms and count the bytes of their messages; beyond, every
rank's program is walked message by message (`exchange/cost.count`); both must meet the closed form. Nothing is timed.

    python benchmarks/traffic.py                     table, 2 to 64 workers
    python benchmarks/traffic.py --plot busiest.svg  and the picture
    python benchmarks/traffic.py --json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch

from meshwright.comm.transports.base import Work
from meshwright.comm.transports.exchange import Choice, ExchangeTransport
from meshwright.exchange.catalogue import make_exchange
from meshwright.exchange.cost import count, formula
from meshwright.testing.ranks import RankPool

NUMEL = 3 * 5 * 7 * 64  # divides over 2 to 8, 16, 32 and 64 ranks
ITEMSIZE = 4
# Name, algorithm, servers as a function of the workers.
KINDS = (
    ("ring", "ring", lambda _workers: 0),
    ("1 server", "parameter_server", lambda _workers: 1),
    ("4 servers", "parameter_server", lambda _workers: 4),
    ("a server a worker", "parameter_server", lambda workers: workers),
)
MOST_REAL_RANKS = 16
COLOURS = ("#1b6ca8", "#c0392b", "#d68910", "#1e8449")


@dataclass(frozen=True)
class Row:
    """Bytes of one kind over the buffer's bytes.

    Attributes:
        workers: ranks that bring gradients.
        servers: servers.
        worker: most bytes that a worker sends.
        busiest: bytes of the busiest rank in its busier direction.
        how: `ranks` (counted on real ones) or `programs` (walked).
    """

    kind: str
    workers: int
    servers: int
    worker: float
    busiest: float
    how: str


class Counting:
    """A transport that counts the bytes of its messages, both ways."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.name, self.sent, self.received = inner, inner.name, 0, 0

    def send(self, tensor: torch.Tensor, index: int, tag: int) -> Work:
        self.sent += tensor.nbytes
        return self._inner.send(tensor, index, tag)

    def receive(self, tensor: torch.Tensor, index: int, tag: int) -> Work:
        self.received += tensor.nbytes
        return self._inner.receive(tensor, index, tag)


def of_this_rank(mesh: Any, algorithm: str, num_servers: int) -> tuple[int, int]:
    """(sent, received) bytes of this rank; workers check the sum."""
    group, workers = mesh.group("dp"), mesh.world.size - num_servers
    counting: Any = Counting(group.transport)
    choice = Choice({"all_reduce": algorithm}, num_servers=num_servers)
    transport = ExchangeTransport(counting, group.index, group.size, choice)
    values = torch.full((NUMEL,), float(mesh.rank))
    transport.all_reduce(values).wait()
    if mesh.rank < workers:
        assert torch.equal(values, torch.full((NUMEL,), float(sum(range(workers)))))
    return counting.sent, counting.received


def row_of(pool: RankPool, kind: str, algorithm: str, workers: int, servers: int) -> Row:
    """Counted on ranks where there are few, else in programs; checked against the closed form."""
    nbytes = NUMEL * ITEMSIZE
    if workers + servers <= MOST_REAL_RANKS:
        moved = pool.run(of_this_rank, workers + servers, algorithm, servers, timeout=120)
        worker = max(sent for sent, _ in moved[:workers])
        busiest, how = max(max(pair) for pair in moved), "ranks"
    else:
        made = make_exchange(algorithm, "all_reduce", workers, num_servers=max(servers, 1))
        traffic = count(made, NUMEL, ITEMSIZE)
        worker, busiest, how = traffic.of_a_worker, traffic.busiest, "programs"
    stated = formula(algorithm, "all_reduce", workers, float(nbytes), num_servers=max(servers, 1))
    for seen, said in ((worker, stated.of_a_worker), (busiest, stated.busiest)):
        assert abs(seen - said) <= 0.001 * said, (kind, workers, seen, said)
    return Row(kind, workers, servers, worker / nbytes, busiest / nbytes, how)


def table(sizes: Sequence[int]) -> list[Row]:
    pool = RankPool()
    try:
        return [
            row_of(pool, kind, algorithm, workers, servers(workers))
            for workers in sizes
            for kind, algorithm, servers in KINDS
        ]
    finally:
        pool.close()


def as_text(rows: Sequence[Row]) -> str:
    lines = [
        "| workers | kind | servers | a worker sends | busiest rank | counted on |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.workers} | {r.kind} | {r.servers} | {r.worker:.3f} S | {r.busiest:.3f} S | {r.how} |"
        for r in rows
    ]
    return "\n".join(lines)


def as_svg(rows: Sequence[Row]) -> str:
    """Bytes of the busiest rank over workers, a line a kind; real ranks as filled points."""
    width, height, left, bottom, top = 620, 380, 60, 330, 30
    most_workers, most = max(r.workers for r in rows), max(r.busiest for r in rows)

    def place(row: Row) -> tuple[float, float]:
        return left + (width - left - 150) * row.workers / most_workers, bottom - (
            bottom - top
        ) * row.busiest / most

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><title>Bytes of the busiest rank, over those of the gradient</title>'
        f'<line x1="{left}" y1="{bottom}" x2="{width - 150}" y2="{bottom}" stroke="#444"/>'
        f'<line x1="{left}" y1="{bottom}" x2="{left}" y2="{top}" stroke="#444"/>'
        f'<text x="{left}" y="{height - 12}">workers</text>'
        f'<text x="8" y="{top - 8}">busiest rank, in gradients S</text>'
    ]
    for workers in sorted({r.workers for r in rows}):
        x = left + (width - left - 150) * workers / most_workers
        parts.append(f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{workers}</text>')
    for value in (1, 2, most / 2, most):
        y = bottom - (bottom - top) * value / most
        parts.append(f'<text x="{left - 8}" y="{y + 4:.0f}" text-anchor="end">{value:.0f}</text>')
    for colour, (kind, _, _) in zip(COLOURS, KINDS, strict=True):
        own = [row for row in rows if row.kind == kind]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, own))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for row in own:
            x, y = place(row)
            fill = colour if row.how == "ranks" else "white"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{fill}" stroke="{colour}"/>')
        x, y = place(own[-1])
        parts.append(f'<text x="{x + 8:.0f}" y="{y + 4:.0f}" fill="{colour}">{escape(kind)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4, 7, 8, 16, 32, 64])
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = table(arguments.workers)
    if arguments.plot is not None:
        arguments.plot.write_text(as_svg(rows), encoding="utf-8")
    print(json.dumps([asdict(row) for row in rows]) if arguments.json else as_text(rows))


if __name__ == "__main__":
    main()
