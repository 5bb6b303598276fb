"""Phase 1: one part a task that depends on the batch, each with its own copies of the constants it needs.

Owns the cut of a task graph into atomic parts. Must not know costs.
A task that depends on no input (a transposed weight, a mask of positions) is copied into every part that needs it and
computed again there; it is never sent. Between parts travel only values that depend on the batch; inputs of the batch
are read again where they are needed, and weights belong to every part that reads them.
Source: RaNNC (arXiv 2103.16063), atomic-level partitioning. Difference: what is constant is known from capture, where
sizes are formulas, so that a task that only looks at a shape never holds a whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.graph.task_graph import TaskGraph


@dataclass(frozen=True)
class Part:
    """One task, and the constant ones that are cloned for it.

    Attributes:
        task: its number in the graph.
        constants: numbers of constant tasks, in order.
    """

    task: int
    constants: tuple[int, ...]


@dataclass(frozen=True)
class Sent:
    """A value that passes between parts.

    Attributes:
        value: its name.
        producer: number of a part.
        consumers: numbers of parts, ascending.
    """

    value: str
    producer: int
    consumers: tuple[int, ...]


@dataclass(frozen=True)
class Atomic:
    """The parts of a graph in order.

    Attributes:
        parts: one a task that is not constant.
        sent: values between them.
        shared: storages of parameters that more than one part reads, with those parts.
    """

    parts: tuple[Part, ...]
    sent: tuple[Sent, ...]
    shared: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def num_clones(self) -> int:
        """Copies of constant tasks over all parts."""
        return sum(len(part.constants) for part in self.parts)


def atomic_parts(graph: TaskGraph) -> Atomic:
    """Cut a graph.

    Raises:
        PlanError: E274 for a graph in which nothing depends on the batch.
    """
    numbers = {i: k for k, i in enumerate(i for i, task in enumerate(graph.tasks) if not task.is_constant)}
    if not numbers:
        raise PlanError(
            "E274", f"{graph.name} has no task that depends on its batch: there is nothing to cut"
        )
    needs: dict[int, dict[int, None]] = {}  # constant task to the parts that need it
    sent: dict[str, dict[int, None]] = {}
    reads: dict[str, dict[int, None]] = {}
    for i in reversed(range(len(graph.tasks))):
        users = {numbers[i]: None} if i in numbers else needs.get(i, {})
        for name in graph.tasks[i].inputs:
            value, maker = graph.value[name], graph.producer.get(name)
            if value.kind == "parameter":
                reads.setdefault(value.storage or name, {}).update(users)
            elif maker is not None and maker in numbers:
                sent.setdefault(name, {}).update(users)
            elif maker is not None:
                needs.setdefault(maker, {}).update(users)
    constants: dict[int, list[int]] = {}
    for i in sorted(needs):
        for part in needs[i]:
            constants.setdefault(part, []).append(i)
    parts = tuple(Part(task, tuple(constants.get(number, ()))) for task, number in numbers.items())
    edges = [
        Sent(name, numbers[graph.producer[name]], tuple(sorted(set(users) - {numbers[graph.producer[name]]})))
        for name, users in sent.items()
    ]
    shared = [(storage, tuple(sorted(users))) for storage, users in reads.items() if len(users) > 1]
    return Atomic(
        parts,
        tuple(sorted(edges, key=lambda edge: (edge.producer, edge.consumers))),
        tuple(sorted(shared)),
    )
