"""Who is at fault when ranks stop: rings compared, stalls described, and a thread that ends a hung process.

Owns the comparison of rings (pure functions of what they say), the layout of a run folder's diagnostic files
and the watchdog thread. Knows nothing of torch, of launching or of what the operations compute. Everything it
needs from other ranks it reads from files in the run folder, so it works the same under any launcher.

Simplifications: ranks whose rings are not visible (another host without a shared file system) are named as
such; stacks of other ranks are asked for only where /proc proves that the process is the one meant (Linux);
a rank whose native code never releases the interpreter lock cannot watch itself, but its peers report it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.comm.log import POINT_TO_POINT, CommEvent, CommLog, RingState, read_ring, ring_path
from meshwright.errors import EXIT_WORKER_FAILED

ORDER_RULE = "ranks left the common order of collectives; all must issue the same calls in the same order:"


@dataclass(frozen=True)
class RunFiles:
    """Where a run folder keeps what is needed after a failure.

    Attributes:
        root: the run folder.
    """

    root: Path

    @property
    def events(self) -> Path:
        """Folder of the ranks' rings."""
        return self.root / "events"

    def ring(self, rank: int) -> Path:
        """The ring of `rank`."""
        return ring_path(self.events, rank)

    def log(self, rank: int) -> Path:
        """What `rank` wrote to its standard output and error."""
        return self.root / "logs" / f"rank{rank}.log"

    def stack(self, rank: int) -> Path:
        """Python stacks that `rank` dumped on request."""
        return self.root / "logs" / f"rank{rank}.stack"

    def finding(self, rank: int) -> Path:
        """What the watchdog of `rank` found."""
        return self.root / "errors" / f"rank{rank}.json"

    def clear(self) -> None:
        """Make the folders, and remove what an earlier run left in them."""
        for folder, pattern in (("events", "*.ring"), ("logs", "rank*"), ("errors", "rank*.json")):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
            for path in (self.root / folder).glob(pattern):
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Divergence:
    """The first collective of one group in which ranks asked for different things.

    Attributes:
        axis: name of the group.
        ordinal: which collective over that axis, from 0.
        expected: what most ranks issued (of two, the lower one's).
        expected_rank: the lowest rank that issued it.
        found: what the deviating rank issued instead.
        found_rank: the lowest deviating rank.
        skipped_by: the rank that went on as if the other's call did not exist, where the rings tell.
    """

    axis: str
    ordinal: int
    expected: CommEvent
    expected_rank: int
    found: CommEvent
    found_rank: int
    skipped_by: int | None

    @property
    def culprits(self) -> tuple[int, ...]:
        """The rank to look at first."""
        return (self.found_rank if self.skipped_by is None else self.skipped_by,)

    def describe(self) -> str:
        """One sentence or two that name ranks, calls, causes and axis."""
        text = (
            f"rank {self.expected_rank} issued {_call(self.expected)}, rank {self.found_rank} issued "
            f"{_call(self.found)} as #{self.ordinal:,} over {self.axis}."
        )
        if self.skipped_by is None:
            return text
        skipped = self.expected if self.skipped_by == self.found_rank else self.found
        return f"{text} Rank {self.skipped_by} skipped {_call(skipped)}."


@dataclass(frozen=True)
class Finding:
    """What a watchdog found; kept as JSON in the run folder.

    Attributes:
        code: `E402` (a stall) or `E404` (ranks left the common order).
        message: the text for people.
        rank: who found it.
        culprits: ranks at fault.
        seconds: when, since the epoch.
    """

    code: str
    message: str
    rank: int
    culprits: tuple[int, ...]
    seconds: float


def _call(event: CommEvent) -> str:
    return f"{event.op} of {event.numel:,} {event.dtype} ({event.cause})"


def read_rings(folder: Path, world_size: int) -> list[RingState]:
    """States of all ranks whose rings are readable in `folder`."""
    states = (read_ring(ring_path(folder, rank)) for rank in range(world_size))
    return [state for state in states if state is not None]


def compare_rings(states: Sequence[RingState]) -> Divergence | None:
    """The earliest collective that two ranks of one group issued differently; None when all agree.

    A rank that is merely behind does not diverge; sends and receives are not compared.
    """
    groups: dict[tuple[str, str], dict[int, dict[int, CommEvent]]] = {}
    for state in states:
        for event in state.events:
            if event.op not in POINT_TO_POINT:
                ranks = groups.setdefault((event.axis, event.peers), {})
                ranks.setdefault(state.rank, {})[event.ordinal] = event
    found = [divergence for ranks in groups.values() if (divergence := _first_difference(ranks))]
    return min(found, key=lambda divergence: divergence.found.started, default=None)


def _first_difference(ranks: dict[int, dict[int, CommEvent]]) -> Divergence | None:
    for ordinal in sorted({ordinal for events in ranks.values() for ordinal in events}):
        present = {rank: events[ordinal] for rank, events in sorted(ranks.items()) if ordinal in events}
        votes = {rank: sum(e.same_call(event) for e in present.values()) for rank, event in present.items()}
        expected_rank = max(votes, key=lambda rank: (votes[rank], -rank))
        expected = present[expected_rank]
        for rank, event in present.items():
            if not event.same_call(expected):
                skipped_by = _who_skipped(ranks, ordinal, expected_rank, rank)
                return Divergence(expected.axis, ordinal, expected, expected_rank, event, rank, skipped_by)
    return None


def _who_skipped(
    ranks: dict[int, dict[int, CommEvent]], ordinal: int, expected_rank: int, found_rank: int
) -> int | None:
    """Of two ranks that differ at `ordinal`, the one whose call is the other's next; None if not just one."""
    expected, found = ranks[expected_rank], ranks[found_rank]
    next_expected, next_found = expected.get(ordinal + 1), found.get(ordinal + 1)
    found_is_ahead = next_expected is not None and next_expected.same_call(found[ordinal])
    expected_is_ahead = next_found is not None and next_found.same_call(expected[ordinal])
    if found_is_ahead == expected_is_ahead:
        return None
    return found_rank if found_is_ahead else expected_rank


def parse_peers(text: str) -> tuple[int, ...]:
    """Ranks of an event's `peers`: `0,1,2` or `0..62/2` (first, last, stride)."""
    if ".." not in text:
        return tuple(int(part) for part in text.split(",") if part.isdigit())
    bounds, _, stride = text.partition("/")
    first, _, last = bounds.partition("..")
    return tuple(range(int(first), int(last) + 1, int(stride)))


def waiting_in(state: RingState, states: Sequence[RingState]) -> CommEvent | None:
    """The operation that holds this rank up: of those in flight, the first that a peer has not entered."""
    in_flight = [event for event in state.events if not event.finished]
    late = (event for event in in_flight if _laggards(event, states))
    return next(late, in_flight[0] if in_flight else None)


def _laggards(event: CommEvent, states: Sequence[RingState]) -> list[int]:
    """Peers that have not entered a collective; empty for sends and receives, whose orders do not compare."""
    if event.op in POINT_TO_POINT:
        return []
    entered = {
        state.rank
        for state in states
        for other in state.events
        if (other.axis, other.peers) == (event.axis, event.peers)
        and other.op not in POINT_TO_POINT
        and other.ordinal >= event.ordinal
    }
    return [rank for rank in parse_peers(event.peers) if rank not in entered]


@dataclass(frozen=True)
class Stall:
    """Text about a stall, and the ranks that others wait for while they wait for nobody."""

    text: str
    culprits: tuple[int, ...]


def describe_stall(states: Sequence[RingState], now: float) -> Stall:
    """Who waits in what, who never entered it, and what that rank does instead.

    Args:
        states: the rings that could be read.
        now: seconds since the epoch, to say for how long a rank has been in its phase.
    """
    known = {state.rank: state for state in states}
    waits: dict[tuple[str, str, int, str, str], list[int]] = {}
    events: dict[tuple[str, str, int, str, str], CommEvent] = {}
    for state in sorted(states, key=lambda state: state.rank):
        event = waiting_in(state, states)
        if event is not None:
            key = (event.axis, event.peers, event.ordinal, event.op, event.cause)
            waits.setdefault(key, []).append(state.rank)
            events[key] = event
    waiting = {rank for ranks in waits.values() for rank in ranks}
    sentences, culprits = [], []
    for key, ranks in waits.items():
        event = events[key]
        text = f"{_name_ranks(ranks, capital=True)} {_verb(ranks, 'wait')} in {_place(event)}"
        laggards = [rank for rank in _laggards(event, states) if rank not in waiting]
        culprits += laggards
        reasons = [_excuse(rank, known.get(rank), now) for rank in laggards]
        if not reasons and event.op not in POINT_TO_POINT and not _laggards(event, states):
            away = [rank for rank in parse_peers(event.peers) if rank not in waiting]
            reasons = [f"every rank entered it{f', {_name_ranks(away)} went on' if away else ''}"]
        sentences.append("; ".join([text, *reasons]))
    return Stall(". ".join(sentences) + "." if sentences else "", tuple(sorted(set(culprits))))


def _place(event: CommEvent) -> str:
    return f"{event.op} #{event.ordinal:,} ({event.axis}, {event.cause})"


def _excuse(rank: int, state: RingState | None, now: float) -> str:
    if state is None:
        return f"rank {rank} never entered it, as far as can be seen: it left no ring here"
    step = f" of step {state.step:,}" if state.step >= 0 else ""
    doing = f"it is in {state.phase or 'start'}{step}, for {max(0.0, now - state.progressed):.0f} s"
    return f"rank {rank} never entered it: {doing} (stack: logs/rank{rank}.stack)"


def _name_ranks(ranks: Sequence[int], *, capital: bool = False) -> str:
    """`rank 3`, `ranks 0-2`, `ranks 0, 2, 5`."""
    ordered = sorted(ranks)
    word = ("R" if capital else "r") + ("ank" if len(ordered) == 1 else "anks")
    if len(ordered) > 1 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{word} {ordered[0]}-{ordered[-1]}"
    return f"{word} {', '.join(map(str, ordered))}"


def _verb(ranks: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb


def diagnose(states: Sequence[RingState], *, rank: int, seconds: float, now: float) -> Finding:
    """What rank `rank` reports after `seconds` without progress."""
    divergence = compare_rings(states)
    if divergence is not None:
        message = f"{ORDER_RULE} {divergence.describe()}"
        return Finding("E404", message, rank, divergence.culprits, now)
    stall = describe_stall(states, now)
    return Finding("E402", f"no progress for {seconds:g} s. {stall.text}", rank, stall.culprits, now)


def read_findings(files: RunFiles) -> list[Finding]:
    """Findings of all watchdogs of a run, the earliest first."""
    found = []
    for path in (files.root / "errors").glob("rank*.json"):
        try:
            fields = json.loads(path.read_text())
            found.append(Finding(**{**fields, "culprits": tuple(fields["culprits"])}))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # a watchdog that was killed while writing has told nothing
    return sorted(found, key=lambda finding: finding.seconds)


class Watchdog:
    """A thread that ends this process when an operation is in flight and nothing has moved for too long.

    It reports in `<folder>/errors/rank<N>.json` and on standard error, asks local laggards for their Python
    stacks, and exits with code 5: a thread cannot interrupt a blocked wait inside Gloo. Use as a context
    manager.

    Args:
        log: this rank's log.
        limit_seconds: time without progress after which the run counts as hung.
        folder: the run folder; None: only this rank's own ring is looked at, and nothing is written.
        world_size: number of ranks.
        on_stall: what to do with the finding; default: print it and end the process.
    """

    def __init__(
        self,
        log: CommLog,
        *,
        limit_seconds: float,
        folder: Path | None,
        world_size: int,
        on_stall: Callable[[Finding], None] | None = None,
    ) -> None:
        self._log = log
        self._limit = limit_seconds
        self._files = RunFiles(folder) if folder is not None else None
        self._world_size = world_size
        self._on_stall = on_stall or _end_process
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End watching and wait for the thread."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        # Progress is compared, and timed by the monotonic clock: a wall clock that is set must not end a run.
        seen, since = self._mark(), time.monotonic()
        while not self._stopped.wait(min(1.0, self._limit / 10)):
            mark = self._mark()
            if mark != seen or not self._log.in_flight:
                seen, since = mark, time.monotonic()
            elif time.monotonic() - since >= self._limit:
                self._on_stall(self._report())
                return

    def _mark(self) -> tuple[int, int, float]:
        return self._log.num_started, len(self._log.in_flight), self._log.progressed

    def _report(self) -> Finding:
        if self._files is None:
            return diagnose([self._log.state()], rank=self._log.rank, seconds=self._limit, now=time.time())
        states = read_rings(self._files.events, self._world_size) or [self._log.state()]
        finding = diagnose(states, rank=self._log.rank, seconds=self._limit, now=time.time())
        for state in states:
            if state.rank in finding.culprits:
                _request_stack(state, self._files.ring(state.rank))
        path = self._files.finding(self._log.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(asdict(finding)))
        unfinished.replace(path)
        return finding


def _request_stack(state: RingState, ring: Path) -> None:
    """Ask a rank on this host for its stack.

    SIGUSR1 ends a process that does not expect it, so the process must prove to be the rank by mapping its
    ring.
    """
    try:
        maps = Path(f"/proc/{state.pid}/maps").read_text()
        if str(ring.resolve()) in maps:
            os.kill(state.pid, signal.SIGUSR1)
    except OSError:
        return  # gone meanwhile, another user's, or no /proc here


def _end_process(finding: Finding) -> None:
    print(f"{finding.code} {finding.message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_WORKER_FAILED)
