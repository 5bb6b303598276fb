"""Which activations of a chain of layers are kept for backward, and what is computed again: schedules as plain data.

A layer of the forward either runs saving all that its backward needs (`Save`), or its input alone is kept and the
layers from there on run without saving (`Redo`); when backward reaches the end of such a part, the part runs again by
a schedule of its own, which may keep some layers and put off others once more. Every policy is such a tree:

| policy | tree | forwards of N layers, the first included |
|---|---|---|
| none | all saved | N |
| full | each layer alone is redone | 2N |
| every:k | each segment of k layers is redone at once | 2N |
| constant | the last is saved, all before it redone in the same way: only the input is kept | N + N(N+1)/2 |
| optimal | least time under a limit of memory | between |

Owns the trees, their cost, and the optimal one. Knows no modules and no tensors.
Source of the optimal chain: Beaumont et al., Optimal checkpointing for heterogeneous chains, 2019 (rotor).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

# Memory is counted in so many parts of the limit: sizes are rounded up, so that a schedule always fits.
DEFAULT_SLOTS = 500
Rules = Literal["exact", "rotor"]


@dataclass(frozen=True)
class Save:
    """Layer `layer` runs and keeps all that its backward needs."""

    layer: int


@dataclass(frozen=True)
class Redo:
    """The layers of `again` run without saving; their first input is kept, and backward runs `again`."""

    again: Span


@dataclass(frozen=True)
class Span:
    """A forward over neighbouring layers, in order."""

    items: tuple[Save | Redo, ...]

    @property
    def first(self) -> int:
        """Its first layer."""
        head = self.items[0]
        return head.layer if isinstance(head, Save) else head.again.first

    @property
    def stop(self) -> int:
        """One behind its last layer."""
        tail = self.items[-1]
        return tail.layer + 1 if isinstance(tail, Save) else tail.again.stop

    def __str__(self) -> str:
        return " ".join(str(i.layer) if isinstance(i, Save) else f"({i.again})" for i in self.items)


@dataclass(frozen=True)
class Layer:
    """What one layer costs; sizes in bytes, times in any one unit.

    Attributes:
        forward: time.
        backward: time.
        output: bytes of its output.
        saved: bytes that its backward needs beside its input, the output included.
        forward_extra: bytes that exist only while it runs.
        backward_extra: bytes that exist only while its backward runs.
    """

    forward: float
    backward: float
    output: float
    saved: float
    forward_extra: float = 0.0
    backward_extra: float = 0.0


@dataclass(frozen=True)
class Cost:
    """What a schedule costs.

    Attributes:
        seconds: of forwards, repeated ones included, and backwards.
        peak: most bytes at once, the chain's input included.
        forwards: number of layer forwards, the first ones included.
    """

    seconds: float
    peak: float
    forwards: int


def keep_all(num_layers: int) -> Span:
    """Nothing is computed again."""
    return Span(tuple(Save(layer) for layer in range(num_layers)))


def every(num_layers: int, length: int) -> Span:
    """Segments of `length` layers (the last may be shorter), each redone at once; 1 redoes each layer alone."""
    assert length > 0, f"segments of {length} layers"
    firsts = range(0, num_layers, length)
    parts = [Span(tuple(Save(i) for i in range(a, min(a + length, num_layers)))) for a in firsts]
    return Span(tuple(Redo(part) for part in parts))


def square_root_length(num_layers: int) -> int:
    """The segment length that keeps least where layers are alike: about √N (Chen et al., arXiv 1604.06174)."""
    return max(1, round(math.sqrt(num_layers)))


def constant(num_layers: int) -> Span:
    """Only the input is kept, whatever the depth; time grows with the square of it."""
    part = Span((Save(0),))
    for layer in range(1, num_layers):
        part = Span((Redo(part), Save(layer)))
    return Span((Redo(part),))


def cost_of(schedule: Span, layers: Sequence[Layer], *, input_bytes: float) -> Cost:
    """Run `schedule` on paper, backward in reverse order.

    Kept inputs and saved layers are held until their backward is over. The gradient of a layer's output has the
    bytes of the output.
    """
    over = (schedule.first, schedule.stop)
    assert over == (0, len(layers)), f"{schedule} is not over {len(layers)} layers"
    return _OnPaper(layers, input_bytes).run(schedule)


class _OnPaper:
    """Walks a schedule and notes what is held."""

    def __init__(self, layers: Sequence[Layer], input_bytes: float) -> None:
        self._layers = layers
        self._inputs = [input_bytes, *(layer.output for layer in layers)]
        self._held = self._peak = input_bytes
        self._gradient = 0.0  # of the output of what comes next in backward
        self._seconds = 0.0
        self._forwards = 0

    def run(self, schedule: Span) -> Cost:
        self._span(schedule, self._inputs[-1])
        return Cost(self._seconds, self._peak, self._forwards)

    def _note(self, extra: float) -> None:
        self._peak = max(self._peak, self._held + self._gradient + extra)

    def _span(self, span: Span, gradient: float) -> None:
        """Forward over `span` and then its backward; the input of its first layer is held by whoever calls."""
        kept = [self._run_item(span, position) for position in range(len(span.items))]
        self._gradient = gradient
        for item, held in zip(reversed(span.items), reversed(kept), strict=True):
            if isinstance(item, Save):
                self._note(self._layers[item.layer].backward_extra)
                self._seconds += self._layers[item.layer].backward
                self._gradient = self._inputs[item.layer]
            else:
                self._span(item.again, self._gradient)
            self._held -= held

    def _run_item(self, span: Span, position: int) -> float:
        """One item of the forward; returns the bytes that it keeps."""
        item = span.items[position]
        first = item.layer if isinstance(item, Save) else item.again.first
        after_redo = position > 0 and isinstance(span.items[position - 1], Redo)
        kept = self._inputs[first] if after_redo else 0.0  # a saved layer keeps its output itself
        self._held += kept
        if isinstance(item, Save):
            saved = self._layers[first].saved
            self._forward(first, saved, in_flight=0.0)
            self._held += saved
            return kept + saved
        for layer in range(first, item.again.stop):
            in_flight = 0.0 if layer == first else self._inputs[layer]
            self._forward(layer, self._inputs[layer + 1], in_flight=in_flight)
        return kept

    def _forward(self, layer: int, made: float, *, in_flight: float) -> None:
        self._note(in_flight + made + self._layers[layer].forward_extra)
        self._seconds += self._layers[layer].forward
        self._forwards += 1


def optimal(
    layers: Sequence[Layer],
    *,
    input_bytes: float,
    limit: float,
    slots: int = DEFAULT_SLOTS,
    rules: Rules = "exact",
) -> Span | None:
    """The schedule of least time whose peak stays within `limit` bytes, the chain's input included; None: none does.

    Time O(N³ · slots), in steps over whole rows of slots.

    Args:
        layers: the chain.
        input_bytes: of its input.
        limit: bytes.
        slots: parts of the limit in which memory is counted; sizes are rounded up to whole parts.
        rules: what must fit: what `cost_of` counts, or (`rotor`) the bounds of the published algorithm, which let the
            last output's gradient wait in the first forward too, and ask room to run a part without saving where it
            is saved.
    """
    if limit <= input_bytes or not layers:
        return None
    unit = limit / slots
    table = _Table(layers, input_bytes=input_bytes, unit=unit, slots=slots, rules=rules)
    room = slots - math.ceil(input_bytes / unit - 1e-9)
    if room < 0 or not math.isfinite(table.best(0, len(layers) - 1)[room]):
        return None
    return table.schedule(0, len(layers) - 1, room)


class _Table:
    """Least times C(i, j, m) of forward and backward over layers i..j with m slots beside the input of i."""

    def __init__(
        self, layers: Sequence[Layer], *, input_bytes: float, unit: float, slots: int, rules: Rules
    ) -> None:
        def whole(size: float) -> int:
            return math.ceil(size / unit - 1e-9)

        self._slots = slots
        self._rules = rules
        self._num = len(layers)
        self._sums = np.concatenate([[0.0], np.cumsum([layer.forward for layer in layers])])
        self._inputs = [whole(input_bytes), *(whole(layer.output) for layer in layers)]
        self._saved = [whole(layer.saved) for layer in layers]
        self._extra = [(whole(layer.forward_extra), whole(layer.backward_extra)) for layer in layers]
        self._times = [layer.forward + layer.backward for layer in layers]
        self._kinds = list(layers)
        self._rows: dict[tuple[int, int], np.ndarray] = {}
        self._choices: dict[tuple[int, int], np.ndarray] = {}
        for length in range(self._num):
            self._fill_all(length)

    def best(self, first: int, last: int) -> np.ndarray:
        """Least time for every number of slots, infinite where it does not fit."""
        return self._rows[first, last]

    def _waiting(self, last: int) -> int:
        """Slots of the gradient that waits while layers up to `last` run; parts with the last layer run first only."""
        return 0 if last == self._num - 1 and self._rules == "exact" else self._inputs[last + 1]

    def _needed_to_save(self, layer: int, last: int) -> int:
        """Slots to run `layer` saving, in a part that ends with `last`, and later its backward."""
        saved, (forward, backward) = self._saved[layer], self._extra[layer]
        if self._rules == "rotor":
            return self._inputs[layer + 1] + saved + max(forward, backward)
        return saved + max(forward + self._waiting(last), backward + self._inputs[layer + 1])

    def _limited(self, row: np.ndarray, needed: int) -> np.ndarray:
        row[: min(needed, self._slots + 1)] = np.inf
        return row

    def _shifted(self, row: np.ndarray, used: int) -> np.ndarray:
        """`row` of m - used, for every m."""
        result = np.full_like(row, np.inf)
        if used <= self._slots:
            result[used:] = row[: len(row) - used]
        return result

    def _fill_all(self, length: int) -> None:
        """Every part of `length` + 1 layers; parts of equal layers are worked out once."""
        done: dict[tuple[object, ...], int] = {}
        for first in range(self._num - length):
            last = first + length
            kind = (*self._kinds[first : last + 1], self._waiting(last))
            if kind in done:
                twin = done[kind], done[kind] + length
                self._rows[first, last], self._choices[first, last] = self._rows[twin], self._choices[twin]
            else:
                done[kind] = first
                self._fill(first, last)

    def _fill(self, first: int, last: int) -> None:
        time, saved = self._times[first], self._saved[first]
        choices = np.zeros(self._slots + 1, dtype=np.int32)
        if first == last:
            row = np.full(self._slots + 1, float(time))
            self._rows[first, last] = self._limited(row, self._needed_to_save(first, last))
            self._choices[first, last] = choices
            return
        # Running a layer without saving takes its input (but the part's, which is held) and its output.
        skip = [self._inputs[q + 1] + self._extra[q][0] for q in range(first, last)]
        skip[1:] = [need + self._inputs[q] for q, need in enumerate(skip[1:], first + 1)]
        row = time + self._shifted(self._rows[first + 1, last], saved)
        # Choice 0: all of the first layer is kept; k: the input of layer first + k is kept.
        row = self._limited(row, self._needed_to_save(first, last))
        most = 0
        for cut in range(first + 1, last + 1):
            most = max(most, skip[cut - 1 - first])
            later = self._shifted(self._rows[cut, last], self._inputs[cut])
            other = self._sums[cut] - self._sums[first] + later + self._rows[first, cut - 1]
            other = self._limited(other, self._waiting(last) + most)
            choices[other < row] = cut - first
            row = np.minimum(row, other)
        if self._rules == "rotor":
            row = self._limited(row, self._waiting(last) + max(skip))
        self._rows[first, last], self._choices[first, last] = row, choices

    def schedule(self, first: int, last: int, room: int) -> Span:
        """The tree behind C(first, last, room)."""
        items: list[Save | Redo] = []
        while first < last:
            choice = int(self._choices[first, last][room])
            if choice == 0:
                items.append(Save(first))
                room -= self._saved[first]
                first += 1
            else:
                items.append(Redo(self.schedule(first, first + choice - 1, room)))
                first += choice
                room -= self._inputs[first]
        items.append(Save(first))
        return Span(tuple(items))


@dataclass(frozen=True)
class Mode:
    """One way to run a layer: seconds that it adds, and bytes that it holds until its backward."""

    name: str
    seconds: float
    held: float


def choose_modes(layers: Sequence[Sequence[Mode]], *, limit: float) -> list[Mode] | None:
    """One mode a layer of least time in sum within `limit` bytes; None where even the leanest do not fit.

    Exact: sets of (bytes, seconds) of which no other has less of both. Layers that repeat share their work.
    """
    front: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for modes in layers:
        grown = [
            (held + mode.held, seconds + mode.seconds, (*chosen, number))
            for held, seconds, chosen in front
            for number, mode in enumerate(modes)
            if held + mode.held <= limit
        ]
        front = _not_dominated(grown)
    if not front:
        return None
    _, _, chosen = min(front, key=lambda entry: (entry[1], entry[0]))
    return [modes[number] for modes, number in zip(layers, chosen, strict=True)]


def _not_dominated(
    entries: list[tuple[float, float, tuple[int, ...]]],
) -> list[tuple[float, float, tuple[int, ...]]]:
    """Entries of which no other has neither more bytes nor more seconds."""
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for entry in sorted(entries, key=lambda e: (e[0], e[1])):
        if not kept or entry[1] < kept[-1][1]:
            kept.append(entry)
    return kept


@lru_cache(maxsize=64)
def forwards_of(schedule: Span) -> tuple[int, ...]:
    """How often each layer of a schedule runs forward, its first run included."""
    counts = [0] * (schedule.stop - schedule.first)

    def walk(span: Span) -> None:
        for item in span.items:
            layers = (item.layer,) if isinstance(item, Save) else range(item.again.first, item.again.stop)
            for layer in layers:
                counts[layer - schedule.first] += 1
            if isinstance(item, Redo):
                walk(item.again)

    walk(schedule)
    return tuple(counts)


def reruns_of(schedule: Span) -> dict[int, tuple[int, ...]]:
    """Layer to the layers that run again, in order, when its backward begins; backwards come in reverse order."""
    found: dict[int, list[int]] = {}

    def backward(span: Span) -> None:
        for item in reversed(span.items):
            if isinstance(item, Redo):
                again = item.again
                ran = [
                    layer
                    for part in again.items
                    for layer in (
                        [part.layer] if isinstance(part, Save) else range(part.again.first, part.again.stop)
                    )
                ]
                found.setdefault(again.stop - 1, []).extend(ran)
                backward(again)

    backward(schedule)
    return {layer: tuple(ran) for layer, ran in found.items()}
