"""Blocks that repeat in a graph, found by what their tasks are and how they are wired, not by their names.

Owns the structural digest and the run-length form: GPT-3 is an embedding, 96 times one block, and a head.
Method: tasks become codes (op, arguments, shapes); the longest stretch that repeats itself at once is taken first, then
the rest on both sides; repeats whose inner wiring differs are told apart. Cost: one comparison of arrays a period.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.graph.task_graph import Ref, Task, TaskGraph

# A stretch of fewer tasks is no block of a model.
_FEWEST_TASKS = 4
_NUMBERED = re.compile(r"^(.*?\.?\d+)(?:\.|$)")


@dataclass(frozen=True)
class Block:
    """`count` equal stretches of tasks, one after the other.

    Attributes:
        start: number of the first task.
        length: tasks of one stretch.
        count: stretches.
        digest: equal digests are equal tasks, shapes and wiring.
        path: the numbered module that a stretch lies in, e.g. `blocks.0`, else "".
    """

    start: int
    length: int
    count: int
    digest: str
    path: str

    @property
    def stop(self) -> int:
        """Number of the task after the last."""
        return self.start + self.length * self.count


def find_blocks(graph: TaskGraph) -> tuple[Block, ...]:
    """All tasks in order, as blocks; one that repeats has `count` above 1."""
    numbers: dict[Any, int] = {}
    codes = np.array(
        [numbers.setdefault(_code(graph, task), len(numbers)) for task in graph.tasks], dtype=np.int64
    )
    return tuple(_cut(graph, codes, 0, len(codes)))


def _cut(graph: TaskGraph, codes: NDArray[np.int64], start: int, stop: int) -> Iterator[Block]:
    if start >= stop:
        return
    found = _best_repeat(codes[start:stop])
    if found is None:
        yield _block(graph, start, stop - start, 1)
        return
    first, period, reach = found
    first += start
    count = reach // period + 1
    first += _aligned(graph, first, reach - (count - 1) * period)
    yield from _cut(graph, codes, start, first)
    digests = [digest_of(graph, first + i * period, period) for i in range(count)]
    at = first
    for _, same in itertools.groupby(digests):
        times = len(list(same))
        yield _block(graph, at, period, times)
        at += times * period
    yield from _cut(graph, codes, at, stop)


def _best_repeat(codes: NDArray[np.int64]) -> tuple[int, int, int] | None:
    """(start, period, reach) of the repeat that covers most; `reach` codes equal those one period later."""
    best, covered = None, 0
    for period in range(_FEWEST_TASKS, len(codes) // 2 + 1):
        different = np.flatnonzero(codes[:-period] != codes[period:])
        edges = np.concatenate(([-1], different, [len(codes) - period]))
        runs = np.diff(edges) - 1
        longest = int(runs.argmax())
        reach = int(runs[longest])
        size = (reach // period + 1) * period
        if reach >= period and size > covered:
            best, covered = (int(edges[longest]) + 1, period, reach), size
    return best


def _aligned(graph: TaskGraph, first: int, slack: int) -> int:
    """How far to move a repeat so that it starts where a numbered module does."""
    for shift in range(slack + 1):
        here = _numbered(graph.tasks[first + shift])
        if here and (first + shift == 0 or _numbered(graph.tasks[first + shift - 1]) != here):
            return shift
    return 0


def _block(graph: TaskGraph, start: int, length: int, count: int) -> Block:
    places = {_numbered(task) for task in graph.tasks[start : start + length]} - {""}
    path = places.pop() if len(places) == 1 else ""
    return Block(start, length, count, digest_of(graph, start, length), path)


def _numbered(task: Task) -> str:
    """The outermost module with a number that a task lies in."""
    found = _NUMBERED.match(task.path)
    return found[1] if found else ""


def _code(graph: TaskGraph, task: Task) -> Any:
    """What a task is, whatever its inputs are called."""

    def anonymous(part: Any) -> Any:
        if isinstance(part, Ref):
            value = graph.value[part.name]
            return value.kind in ("parameter", "buffer"), value.shape, value.dtype
        return tuple(map(anonymous, part)) if isinstance(part, tuple) else (type(part).__name__, part)

    inside = tuple(anonymous(Ref(name)) for name in task.parameters)
    op = "module" if task.op.startswith("module:") else task.op
    return op, anonymous(task.arguments), anonymous(task.keywords), inside, len(task.outputs), task.flops


def digest_of(graph: TaskGraph, start: int, length: int) -> str:
    """Hash of a stretch: codes, and which task's result each input is; what comes from outside is numbered by use."""
    outside: dict[str, int] = {}
    rows = []
    for i in range(start, start + length):
        task = graph.tasks[i]
        wires = []
        for name in task.inputs:
            producer = graph.producer.get(name, -1)
            if start <= producer < start + length:
                wires.append((producer - start, graph.tasks[producer].outputs.index(name)))
            else:
                wires.append((-1, outside.setdefault(name, len(outside))))
        rows.append((_code(graph, task), wires))
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:12]
