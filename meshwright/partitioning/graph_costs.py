"""Costs of a captured model: seconds by a roofline, bytes from the graph, as chains of blocks at any samples.

Owns the way from a task graph to what the algorithms take. Must not know how blocks are chosen, nor torch.
A task takes the longer of its products at peak and its bytes at memory bandwidth, and a fixed time to start. Backward
has its own products and moves twice the bytes. Measured seconds of stretches of tasks can replace both.
Simplifications: what autograd keeps is charged to the first task that keeps it; views of one storage that cross a cut
count together, at most the whole storage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.errors import PlanError
from meshwright.graph.formula import Formula, total
from meshwright.graph.task_graph import Task, TaskGraph
from meshwright.partitioning.atomic import Atomic, Sent, atomic_parts
from meshwright.partitioning.chain import Block, Carried, Chain, Tie
from meshwright.partitioning.levels import Level, single_parts


@dataclass(frozen=True)
class Roofline:
    """A device as three numbers.

    Attributes:
        flops_per_second: that products reach.
        bytes_per_second: of its memory.
        task_seconds: to start a task.
    """

    flops_per_second: float
    bytes_per_second: float
    task_seconds: float = 0.0


@dataclass(frozen=True)
class PartCosts:
    """Of each part at some samples: seconds of forward and backward, bytes kept for backward."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    kept: tuple[float, ...]


@dataclass(frozen=True)
class TaskSeconds:
    """Measured seconds of the tasks first <= i < stop together, forward and backward."""

    first: int
    stop: int
    forward: float
    backward: float


# (samples) -> seconds of stretches of tasks
Measured = Callable[[int], Sequence[TaskSeconds]]


class GraphCosts:
    """A graph with its atomic parts, priced."""

    def __init__(
        self, graph: TaskGraph, roofline: Roofline, *, sequence: int = 0, measured: Measured | None = None
    ) -> None:
        """Take a graph.

        Args:
            graph: captured, with costs.
            roofline: of the devices.
            sequence: positions; 0: as captured.
            measured: seconds of stretches of tasks; the roofline then says how they lie within a stretch.

        Raises:
            PlanError: E273 for a graph that does not show how tensors travel, E274 for one that nothing depends on.
        """
        if graph.source == "modules":
            raise PlanError(
                "E273",
                f"{graph.name} could be read module by module only, which does not show where tensors come from, so it "
                f"cannot be cut: {'; '.join(graph.notes)}",
            )
        self.graph = graph
        self.atomic: Atomic = atomic_parts(graph)
        self._roofline, self._measured = roofline, measured
        self._sequence = sequence or graph.sequence
        self._made: dict[int, PartCosts] = {}

    def parts(self, samples: int) -> PartCosts:
        """Costs of each part."""
        if samples not in self._made:
            priced = self._roofline_costs(samples)
            self._made[samples] = self._scaled(priced, self._measured(samples)) if self._measured else priced
        return self._made[samples]

    @cached_property
    def parts_level(self) -> Level:
        """Every part a block; bytes are of as many samples as at capture."""
        return single_parts(len(self.atomic.parts), self.carried(self.graph.batch))

    def carried(self, samples: int) -> tuple[Carried, ...]:
        """Tensors between parts; views of one storage together."""
        at, scale = self._sizes(samples)
        return tuple(
            Carried(producer, readers, min(whole(*at), sum(size(*at) for size in sizes)) * scale)
            for producer, readers, whole, sizes in self._travelling
        )

    @cached_property
    def _travelling(self) -> tuple[tuple[int, tuple[int, ...], Formula, tuple[Formula, ...]], ...]:
        """Producer, readers, bytes of the storage, and bytes of each value that travels."""
        groups: dict[str, list[Sent]] = {}
        for sent in self.atomic.sent:
            if sent.consumers:
                groups.setdefault(self.graph.value[sent.value].storage or sent.value, []).append(sent)
        found = []
        for storage, values in groups.items():
            first = min(sent.producer for sent in values)
            readers = sorted({reader for sent in values for reader in sent.consumers} - {first})
            sizes = tuple(self.graph.value[sent.value].bytes for sent in values)
            found.append((first, tuple(readers), self.graph.value[storage].bytes, sizes))
        return tuple(found)

    def chain(self, level: Level, samples: int) -> Chain:
        """The blocks of a level, of whatever parts, at so many samples on one device."""
        costs, block_of = self.parts(samples), level.block_of
        params, ties = self._params(level)
        blocks = tuple(
            Block(
                sum(costs.forward[part] for part in members),
                sum(costs.backward[part] for part in members),
                params[number],
                sum(costs.kept[part] for part in members),
                name=self.label(members),
            )
            for number, members in enumerate(level.blocks)
        )
        carried = []
        for value in self.carried(samples):
            source = block_of[value.producer]
            readers = sorted({block_of[reader] for reader in value.consumers} - {source})
            if readers:
                carried.append(Carried(source, tuple(readers), value.bytes))
        return Chain(blocks, tuple(carried), ties)

    def label(self, members: tuple[int, ...]) -> str:
        """First and last module of some parts."""
        ends = [self.graph.tasks[self.atomic.parts[part].task] for part in (members[0], members[-1])]
        names = [task.path or task.op for task in ends]
        return names[0] if names[0] == names[1] else f"{names[0]} .. {names[1]}"

    def _sizes(self, samples: int) -> tuple[tuple[int, int], float]:
        """Sizes to evaluate at, and the share of them that is wanted where the batch is fixed."""
        if "batch" in self.graph.free:
            return (samples, self._sequence), 1.0
        return (self.graph.batch, self._sequence), samples / self.graph.batch

    def _roofline_costs(self, samples: int) -> PartCosts:
        of_kind = [self._task_costs(task, kept, samples) for task, kept in self._kinds[0]]
        rows = []
        for part in self.atomic.parts:
            tasks = [of_kind[self._kinds[1][number]] for number in (*part.constants, part.task)]
            rows.append(tuple(map(sum, zip(*tasks, strict=True))))
        forward, backward, kept = zip(*rows, strict=True)
        return PartCosts(forward, backward, kept)

    def _scaled(self, priced: PartCosts, measured: Sequence[TaskSeconds]) -> PartCosts:
        """Seconds of the parts of each stretch, so that they sum to what was measured."""
        number_of = {part.task: number for number, part in enumerate(self.atomic.parts)}
        forward, backward = list(priced.forward), list(priced.backward)
        for stretch in measured:
            members = [number_of[i] for i in range(stretch.first, stretch.stop) if i in number_of]
            for line, seconds in ((forward, stretch.forward), (backward, stretch.backward)):
                expected = sum(line[number] for number in members)
                for number in members:
                    line[number] *= seconds / expected if expected else 0.0
        return PartCosts(tuple(forward), tuple(backward), priced.kept)

    def _task_costs(self, task: Task, kept: Formula, samples: int) -> tuple[float, float, float]:
        """Seconds of forward and backward, bytes kept."""
        at, scale = self._sizes(samples)
        start, moved = self._roofline.task_seconds, (task.read_bytes(*at) + task.written_bytes(*at)) * scale
        forward = max(self._products(task.flops(*at) * scale), self._bytes(moved)) + start
        backward = 0.0
        if not task.is_detached:
            backward = max(self._products(task.backward_flops(*at) * scale), self._bytes(2 * moved)) + start
        return forward, backward, kept(*at) * scale

    @cached_property
    def _kinds(self) -> tuple[list[tuple[Task, Formula]], list[int]]:
        """One task of each kind, with what it keeps, and the kind of each task: repeated layers are priced once."""
        numbers: dict[tuple[Formula | bool, ...], int] = {}
        examples, kind_of = [], []
        for task, kept in zip(self.graph.tasks, self._kept, strict=True):
            costs = (task.flops, task.backward_flops, task.read_bytes, task.written_bytes)
            key = (*costs, kept, task.is_detached)
            if key not in numbers:
                examples.append((task, kept))
            kind_of.append(numbers.setdefault(key, len(numbers)))
        return examples, kind_of

    @cached_property
    def _kept(self) -> tuple[Formula, ...]:
        """Of each task, bytes that it is the first to keep."""
        seen: set[str] = set()
        found = []
        for task in self.graph.tasks:
            own = dict.fromkeys(self.graph.value[name].storage or name for name in task.saved)
            fresh = [self.graph.value[storage] for storage in own if storage not in seen]
            seen.update(own)
            tensors = [value.bytes for value in fresh if value.kind not in ("parameter", "buffer")]
            found.append(total([task.saved_bytes, *tensors]))
        return tuple(found)

    def _products(self, flops: float) -> float:
        return flops / self._roofline.flops_per_second

    def _bytes(self, count: float) -> float:
        return count / self._roofline.bytes_per_second

    def _params(self, level: Level) -> tuple[list[float], tuple[Tie, ...]]:
        """Bytes of the weights of each block alone, and those that several blocks read."""
        own, ties = [0.0] * len(level.blocks), []
        for name, size, parts in self._weights:
            blocks = sorted({level.block_of[part] for part in parts})
            if len(blocks) == 1:
                own[blocks[0]] += size
            else:
                ties.append(Tie(tuple(blocks), size, name))
        return own, tuple(ties)

    @cached_property
    def _weights(self) -> tuple[tuple[str, float, tuple[int, ...]], ...]:
        """Name, bytes and reading parts of each storage of parameters."""
        readers: dict[str, set[int]] = {}
        for number, part in enumerate(self.atomic.parts):
            for task in (*part.constants, part.task):
                for name in self.graph.tasks[task].inputs:
                    value = self.graph.value[name]
                    if value.kind == "parameter":
                        readers.setdefault(value.storage or name, set()).add(number)
        roots = ((self.graph.value[storage], parts) for storage, parts in readers.items())
        return tuple((v.path or v.name, float(v.bytes(0, 0)), tuple(sorted(parts))) for v, parts in roots)


def contiguous(starts: tuple[int, ...], num_parts: int) -> tuple[tuple[int, ...], ...]:
    """Blocks of neighbouring parts, from where they start."""
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise((*starts, num_parts)))
