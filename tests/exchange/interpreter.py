"""Runs an exchange on numbers, one coroutine a rank, blocking like the network: the truth that the checker must meet.

Independent of the checker: it moves numpy integers, knows nothing of contributions, and looks at results only.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

import numpy as np

from meshwright.exchange.program import Exchange, Program, Receive, Span

# One element a chunk: values this large and random make an accidental equality impossible.
_LIMIT = 1 << 40


def is_right(exchange: Exchange, seed: int) -> bool:
    """Whether every rank finishes, and with the values that the collective promises."""
    rng = np.random.default_rng(seed)
    shape = (exchange.num_ranks, exchange.num_chunks)
    inputs = rng.integers(1, _LIMIT, shape)
    junk = rng.integers(1, _LIMIT, (2, *shape))
    buffers = [_start(exchange, rank, inputs[rank], junk[0, rank]) for rank in range(exchange.num_ranks)]
    if not _run(exchange, inputs, buffers, junk[1]):
        return False
    total = inputs[: exchange.num_workers].sum(axis=0)
    for rank, buffer in enumerate(buffers):
        match exchange.collective:
            case "all_reduce":
                right = rank >= exchange.num_workers or np.array_equal(buffer, total)
            case "reduce_scatter":
                right = buffer[rank] == total[rank]
            case "reduce":
                right = rank != exchange.root or np.array_equal(buffer, total)
            case "all_gather":
                right = np.array_equal(buffer, np.diagonal(inputs))
            case "broadcast":
                asked = rank < exchange.num_workers or rank == exchange.root
                right = not asked or np.array_equal(buffer, inputs[exchange.root])
            case _:
                right = np.array_equal(buffer, inputs[:, rank])
        if not right:
            return False
    return True


def _start(exchange: Exchange, rank: int, inputs: np.ndarray, junk: np.ndarray) -> np.ndarray:
    buffer = junk.copy()
    if exchange.collective == "all_gather" or exchange.collective == "all_to_all":
        buffer[rank] = inputs[rank]
    elif exchange.collective == "broadcast":
        if rank == exchange.root:
            buffer[:] = inputs
    elif rank < exchange.num_workers:
        buffer[:] = inputs
    return buffer


class _Network:
    """Wires between ranks; what is sent waits until it is taken, and its sender with it."""

    def __init__(self) -> None:
        self.wires: dict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)
        self.taken: dict[tuple[int, int], int] = defaultdict(int)
        self.given: dict[tuple[int, int], int] = defaultdict(int)
        self.wrong_size = False

    def give(self, source: int, target: int, values: np.ndarray) -> tuple[tuple[int, int], int]:
        """Send; the returned (wire, number) is done when `taken` of the wire reaches the number."""
        wire = (source, target)
        self.wires[wire].append(values)
        self.given[wire] += 1
        return wire, self.given[wire]

    def take(self, source: int, target: int, num_chunks: int) -> Iterator[None]:
        """Wait for the next message; returns it."""
        wire = (source, target)
        while not self.wires[wire]:
            yield
        self.taken[wire] += 1
        values = self.wires[wire].popleft()
        self.wrong_size |= len(values) != num_chunks
        return values

    @property
    def activity(self) -> int:
        return sum(self.taken.values()) + sum(self.given.values())


def _run(exchange: Exchange, inputs: np.ndarray, buffers: list[np.ndarray], junk: np.ndarray) -> bool:
    network = _Network()
    loops = {}
    for rank, program in enumerate(exchange.programs):
        source = inputs[rank] if exchange.collective == "all_to_all" else None
        loops[rank] = _rank_loop(program, rank, network, buffers[rank], junk[rank], source)
    before = None
    while loops:
        for rank in list(loops):
            if next(loops[rank], "done") == "done":
                del loops[rank]
        now = (len(loops), network.activity)
        if now == before or network.wrong_size:
            return False
        before = now
    return not any(network.wires.values())


def _rank_loop(
    program: Program,
    rank: int,
    network: _Network,
    buffer: np.ndarray,
    junk: np.ndarray,
    inputs: np.ndarray | None,
) -> Iterator[None]:
    for step in program:
        stored = [c for r in step.receives if not r.adds for c in range(r.span.first, r.span.stop)]
        on_the_way = []
        for send in step.sends:
            values = (buffer if inputs is None else inputs)[_slice(send.span)].copy()
            for chunk in stored if inputs is None else ():  # overwritten on its way: anything arrives
                if send.span.first <= chunk < send.span.stop:
                    values[chunk - send.span.first] = junk[chunk]
            on_the_way.append(network.give(rank, send.peer, values))
        arrived = []
        for receive in step.receives:
            values = yield from network.take(receive.peer, rank, len(receive.span))
            if network.wrong_size:
                return
            arrived.append((receive, values))
        while any(network.taken[wire] < number for wire, number in on_the_way):
            yield
        _apply(buffer, arrived, {c: junk[c] for c in stored if stored.count(c) > 1})


def _apply(buffer: np.ndarray, arrived: list[tuple[Receive, np.ndarray]], twice: dict[int, int]) -> None:
    for receive, values in arrived:
        if not receive.adds:
            buffer[_slice(receive.span)] = values
    for chunk, value in twice.items():
        buffer[chunk] = value
    for receive, values in arrived:
        if receive.adds:
            buffer[_slice(receive.span)] += values


def _slice(span: Span) -> slice:
    return slice(span.first, span.stop)
