"""Whether an exchange ends, and with the right sums: it is run on symbols, blocking wherever a real one may block.

A value is the multiset of (rank, chunk) contributions in it, so a sum that misses one, counts one twice or mixes
chunks is told from the right one. What no program wrote, and what a step sends while it stores over it, is junk: legal
as long as nobody's result depends on it. Messages between two ranks arrive in the order in which they were sent; a
rank goes on when every message of its step has found its partner. Cost: the number of messages times the chunks of
one.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from meshwright.exchange.program import Exchange, Receive, Send, Span, Step

# Contributions to a chunk, (rank, chunk) -> how often.
Value = Counter[tuple[int, int]]
_JUNK: Value = Counter({(-1, -1): 1})


@dataclass
class _Rank:
    values: list[Value]
    inputs: list[Value]
    position: int = 0
    waits: int = 0
    adds: list[tuple[int, Message, list[Value]]] = field(default_factory=list)
    stores: list[tuple[Message, list[Value]]] = field(default_factory=list)


def problem_of(exchange: Exchange) -> str | None:
    """What is wrong with `exchange`, in words; None when it is right."""
    machine = _Machine(exchange)
    stopped = machine.run()
    if stopped is not None:
        return stopped
    for rank, state in enumerate(machine.ranks):
        for chunk, value in enumerate(state.values):
            wanted = promised_value(exchange, rank, chunk)
            if wanted is not None and value != wanted:
                return (
                    f"rank {rank} ends with {_text(value)} in chunk {chunk} instead of {_text(wanted)} "
                    f"({exchange.collective} by {exchange.algorithm})"
                )
    return None


def contributions(value: Value) -> frozenset[tuple[int, int]]:
    """Whose chunks are in `value`, (rank, chunk); junk is nobody's."""
    return frozenset(key for key in value if key[0] >= 0)


@dataclass(frozen=True)
class Message:
    """Chunks `span` of `source`, stored or added as chunks `into` of `target`."""

    source: int
    target: int
    span: Span
    into: Span
    adds: bool


@dataclass(frozen=True)
class Round:
    """What arrived while every rank finished one step where it could, and what the ranks hold after it.

    Attributes:
        messages: what arrived.
        held: for each rank and chunk the contributions in it, (rank, chunk); at the start of an all-to-all those
            of the input buffer.
    """

    messages: tuple[Message, ...]
    held: tuple[tuple[frozenset[tuple[int, int]], ...], ...]


def rounds_of(exchange: Exchange) -> list[Round]:
    """A right exchange, round by round; the first is the start, without messages."""
    machine = _Machine(exchange)
    history = [Round((), machine.held(inputs=exchange.collective == "all_to_all"))]
    while machine.round():
        history.append(Round(tuple(machine.arrived), machine.held()))
    return history


class _Machine:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.arrived: list[Message] = []
        self.ranks = []
        for rank in range(exchange.num_ranks):
            first = [initial_value(exchange, rank, chunk) for chunk in range(exchange.num_chunks)]
            if exchange.collective == "all_to_all":
                values = [Counter(_JUNK) for _ in first]
                values[rank] = Counter(first[rank])
            else:
                values = [Counter(value) for value in first]
            self.ranks.append(_Rank(values, first))
        self._sent: dict[tuple[int, int], deque[tuple[Send, list[Value]]]] = defaultdict(deque)
        self._expected: dict[tuple[int, int], deque[tuple[int, Receive]]] = defaultdict(deque)
        for rank in range(exchange.num_ranks):
            self._post(rank)

    def run(self) -> str | None:
        """To the end; a reason when it cannot get there."""
        try:
            while self.round():
                pass
        except _MismatchError as error:
            return str(error)
        stuck = [rank for rank in range(self._exchange.num_ranks) if self._step(rank) is not None]
        if not stuck:
            return None
        rank = stuck[0]
        return f"ranks {stuck} never finish: rank {rank} waits in step {self.ranks[rank].position}"

    def round(self) -> bool:
        """Match messages, then let every rank whose step is complete go on; whether any did."""
        self._match()
        ready = [r for r, state in enumerate(self.ranks) if self._step(r) is not None and not state.waits]
        self.arrived.clear()
        for rank in ready:
            self._finish(rank)
        for rank in ready:
            self._post(rank)
        return bool(ready)

    def held(self, *, inputs: bool = False) -> tuple[tuple[frozenset[tuple[int, int]], ...], ...]:
        """For each rank and chunk, whose chunks are in it."""
        return tuple(
            tuple(contributions(value) for value in (state.inputs if inputs else state.values))
            for state in self.ranks
        )

    def _step(self, rank: int) -> Step | None:
        program = self._exchange.programs[rank]
        position = self.ranks[rank].position
        return program[position] if position < len(program) else None

    def _post(self, rank: int) -> None:
        step, state = self._step(rank), self.ranks[rank]
        if step is None:
            return
        stored = Counter(
            chunk for r in step.receives if not r.adds for chunk in range(r.span.first, r.span.stop)
        )
        source = state.inputs if self._exchange.collective == "all_to_all" else state.values
        for send in step.sends:
            chunks = range(send.span.first, send.span.stop)
            overwritten = self._exchange.collective != "all_to_all"
            values = [Counter(_JUNK) if overwritten and stored[c] else Counter(source[c]) for c in chunks]
            self._sent[rank, send.peer].append((send, values))
        for number, receive in enumerate(step.receives):
            self._expected[receive.peer, rank].append((number, receive))
        state.waits = len(step.sends) + len(step.receives)
        state.adds, state.stores = [], []

    def _match(self) -> None:
        for pair, expected in self._expected.items():
            sent = self._sent[pair]
            while expected and sent:
                (send, values), (number, receive) = sent.popleft(), expected.popleft()
                if len(send.span) != len(receive.span):
                    raise _MismatchError(
                        f"rank {pair[0]} sends {len(send.span)} chunks and rank {pair[1]} expects "
                        f"{len(receive.span)} from it"
                    )
                target, message = self.ranks[pair[1]], Message(*pair, send.span, receive.span, receive.adds)
                if receive.adds:
                    target.adds.append((number, message, values))
                else:
                    target.stores.append((message, values))
                target.waits -= 1
                self.ranks[pair[0]].waits -= 1

    def _finish(self, rank: int) -> None:
        state = self.ranks[rank]
        written: Counter[int] = Counter()
        for message, values in state.stores:
            for chunk, value in zip(range(message.into.first, message.into.stop), values, strict=True):
                written[chunk] += 1
                state.values[chunk] = value if written[chunk] == 1 else Counter(_JUNK)
        for _, message, values in sorted(state.adds, key=lambda add: add[0]):
            for chunk, value in zip(range(message.into.first, message.into.stop), values, strict=True):
                state.values[chunk] = state.values[chunk] + value
        self.arrived += [message for message, _ in state.stores] + [message for _, message, _ in state.adds]
        state.position += 1


class _MismatchError(Exception):
    """Two ranks disagree about the size of a message."""


def initial_value(exchange: Exchange, rank: int, chunk: int) -> Value:
    """What `rank` brings in `chunk`."""
    brings = rank < exchange.num_workers
    if exchange.collective == "all_gather":
        brings = chunk == rank
    elif exchange.collective == "broadcast":
        brings = rank == exchange.root
    return Counter({(rank, chunk): 1}) if brings else Counter(_JUNK)


def promised_value(exchange: Exchange, rank: int, chunk: int) -> Value | None:
    """What `rank` must end with in `chunk`; None where anything is right."""
    everybody: Value = Counter({(worker, chunk): 1 for worker in range(exchange.num_workers)})
    match exchange.collective:
        case "all_reduce":
            return everybody if rank < exchange.num_workers else None
        case "reduce_scatter":
            return everybody if chunk == rank else None
        case "reduce":
            return everybody if rank == exchange.root else None
        case "all_gather":
            return Counter({(chunk, chunk): 1})
        case "broadcast":
            asked = rank < exchange.num_workers or rank == exchange.root
            return Counter({(exchange.root, chunk): 1}) if asked else None
        case _:
            return Counter({(chunk, rank): 1})


def _text(value: Value) -> str:
    if _JUNK.keys() <= value.keys():
        return "bytes that nobody wrote"
    return " + ".join(f"{n} x rank {r}'s chunk {c}" for (r, c), n in sorted(value.items())) or "nothing"
