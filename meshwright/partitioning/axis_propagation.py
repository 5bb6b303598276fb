"""Axes followed through the operations of a graph: which dims go together, what is summed, what is needed whole.

Owns the walk and what rules say with. The rule of each operation is in `axis_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.graph.task_graph import Ref, Task, TaskGraph
from meshwright.partitioning.axes import Axes, Dim

Dims = list[Dim]
# What an operation makes, for each of its outputs; None where it needs its inputs whole.
Rule = Callable[["Propagation", Task], "list[Dims] | None"]


@dataclass
class Propagation:
    """What a graph's operations say about its axes.

    Attributes:
        graph: captured.
        rules: by name of an operation.
        axes: found so far.
        dims: of each value.
        whole: dims that an operation needs whole, with the reason and the number of its task.
        sums: dims over which a task sums, with its number.
        lookups: rows of a table, with the number of the task that looks them up.
    """

    graph: TaskGraph
    rules: Mapping[str, Rule]
    axes: Axes = field(default_factory=Axes)
    dims: dict[str, Dims] = field(default_factory=dict)
    whole: list[tuple[Dim, str, int]] = field(default_factory=list)
    sums: list[tuple[Dim, int]] = field(default_factory=list)
    lookups: list[tuple[Dim, int]] = field(default_factory=list)
    number: int = 0

    def run(self) -> None:
        """Follow all tasks in order."""
        first: dict[str, Dims] = {}
        for value in self.graph.values:
            if value.kind == "activation":
                continue
            # Tied weights are one tensor.
            dims = first.setdefault(value.storage or value.name, self.fresh(value.name))
            self.dims[value.name] = dims
            if value.kind != "parameter":
                self.need(dims, f"the {value.kind} {value.path or value.name} has it")
        for number, task in enumerate(self.graph.tasks):
            self.number = number
            self._follow(task)

    def shape(self, name: str) -> list[int]:
        """Extents of a value at capture."""
        return [extent(self.graph.batch, self.graph.sequence) for extent in self.graph.value[name].shape]

    def fresh(self, name: str) -> Dims:
        """Dims of a value that nothing is known of."""
        dims = [self.axes.make(size) for size in self.shape(name)]
        open_dims = zip(dims, self.graph.value[name].shape, strict=True)
        self.need([dim for dim, extent in open_dims if extent.constant is None], "it is a size of the batch")
        return dims

    def need(self, dims: Sequence[Dim], reason: str) -> None:
        """These dims must be whole."""
        self.whole += [(dim, reason, self.number) for dim in dims if dim]

    def join(self, left: Dim, right: Dim) -> Dim:
        """Two dims that go together."""
        if not self.axes.unite(left, right):
            self.need([left, right], f"{self.what()} divides it in two ways")
        return left or right

    def what(self) -> str:
        """The task at hand, for people."""
        task = self.graph.tasks[self.number]
        return f"{task.op.removeprefix('aten.').partition('.')[0]} in {task.path or 'the loss or the root module'}"

    def _follow(self, task: Task) -> None:
        name = task.op.removeprefix("aten.").partition(".")[0]
        rule = self.rules.get(name)
        inputs = [self.dims[x] for x in task.inputs]
        found = None if rule is None else rule(self, task)
        if found is None:
            for dims in inputs:
                self.need(dims, f"{self.what()} needs it whole")
            found = []
        for i, output in enumerate(task.outputs):
            if not output:
                continue
            own = found[i] if i < len(found) else None
            if own is None or [self.axes.extent(dim) for dim in own] != self.shape(output):
                for dims in inputs:
                    self.need(dims, f"{self.what()} needs it whole")
                own = self.fresh(output)
                self.need(own, f"{self.what()} makes it whole")
            self.dims[output] = own


def aligned(p: Propagation, inputs: Sequence[Dims]) -> Dims:
    """Dims of the result of an elementwise operation."""
    result: Dims = []
    for dims in inputs:
        padded = [()] * (max(len(dims), len(result)) - len(dims)) + list(dims)
        result = [()] * (len(padded) - len(result)) + result
        for i, dim in enumerate(padded):
            result[i] = p.join(result[i], dim) if result[i] and dim else result[i] or dim
    return result


def tensor_at(p: Propagation, task: Task, position: int) -> Dims | None:
    """Dims of a positional argument that is a tensor."""
    part = task.arguments[position] if position < len(task.arguments) else None
    return p.dims[part.name] if isinstance(part, Ref) else None


def argument(task: Task, position: int, name: str, default: Any = None) -> Any:
    """An argument by its place or its name."""
    if position < len(task.arguments):
        return task.arguments[position]
    return dict(task.keywords).get(name, default)


def place_of(dim: Any, count: int) -> int:
    """A dim counted from the front."""
    assert isinstance(dim, int)
    return dim % count
