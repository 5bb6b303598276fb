"""What a captured graph says of its layers and of one axis at a time, for the search of `derive_tensor.py`.

Owns the questions that need no choice: which tasks are products of a layer, which tensors an axis runs through, what is
summed where it is cut. Must not know which axes are cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.graph.formula import Formula, total
from meshwright.graph.task_graph import Ref, Task, TaskGraph
from meshwright.partitioning.axes import Axes, Dim
from meshwright.partitioning.axis_propagation import Propagation
from meshwright.partitioning.tensor_regions import LayerKind, Part

_PRODUCTS = ("aten.linear.default", "aten.addmm.default")


@dataclass
class AxisFacts:
    """A graph whose axes were followed, with the layers that can be cut.

    Attributes:
        found: the axes.
        kinds: the layers, by module name.
        dims: of each value, in axes that are not split further.
        touching: axis to the values that have it.
    """

    found: Propagation
    kinds: Mapping[str, LayerKind]
    dims: dict[str, list[Dim]] = field(init=False)
    touching: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.dims = {name: [self.axes.leaves(dim) for dim in dims] for name, dims in self.found.dims.items()}
        for name, dims in self.dims.items():
            for axis in dict.fromkeys(axis for dim in dims for axis in dim):
                self.touching[axis].append(name)

    @property
    def graph(self) -> TaskGraph:
        """The graph."""
        return self.found.graph

    @property
    def axes(self) -> Axes:
        """Its axes."""
        return self.found.axes

    def called(self, name: str) -> str:
        """A value for people."""
        value = self.graph.value[name]
        return value.path or f"a tensor of {self._path_of(name)}"

    def _path_of(self, name: str) -> str:
        producer = self.graph.producer.get(name)
        return "the batch" if producer is None else self.graph.tasks[producer].path or "the root module"

    def _weight_of(self, task: Task) -> str:
        """The value that a product has as weight; "" for another task."""
        if task.op not in _PRODUCTS:
            return ""
        part = task.arguments[1 if task.op == _PRODUCTS[0] else 2]
        return part.name if isinstance(part, Ref) else ""

    def is_layer(self, task: Task) -> bool:
        """A product of a layer that can be swapped, with the layer's own weight."""
        weight = self._weight_of(task)
        wanted = "linear" if task.op == _PRODUCTS[0] else "transposed"
        if not weight or self.kinds.get(task.path) != wanted:
            return False
        value = self.graph.value[weight]
        own = self.weights[task.path]
        return value.kind == "parameter" and value.storage == self.graph.value[own].storage

    @cached_property
    def weights(self) -> dict[str, str]:
        """Layer to the value that is its weight."""
        by_path = {v.path: v.name for v in self.graph.values if v.kind == "parameter"}
        layers = [name for name in self.kinds if f"{name}.weight" in by_path]
        return defaultdict(str, {name: by_path[f"{name}.weight"] for name in layers})

    @cached_property
    def products(self) -> dict[str, list[Task]]:
        """Layer to its tasks."""
        found: dict[str, list[Task]] = defaultdict(list)
        for task in self.graph.tasks:
            if self.is_layer(task):
                found[task.path].append(task)
        return found

    def sides(self, module: str) -> tuple[Dim, Dim]:
        """(inputs, outputs) of a layer's weight."""
        first, second = self.dims[self.weights[module]]
        return (second, first) if self.kinds[module] == "linear" else (first, second)

    def size(self, axis: int) -> int:
        """Things that an axis is a number of."""
        return self.axes.extent((axis,))

    def part(self, dim: Dim, axis: int) -> Part:
        """Where an axis lies in a dim."""
        at = dim.index(axis)
        return Part(self.axes.extent(dim[:at]), self.axes.extent(dim[at + 1 :]))

    def trains(self, task: Task, name: str) -> bool:
        """Whether a task hands a gradient to an input."""
        return self.graph.value[name].requires_grad and not task.is_detached

    def is_own(self, task: Task, name: str) -> bool:
        """A parameter that only its own module reads, so that its forward can sum the gradients of its parts.

        Not one of the root: its tasks are not told from those of the loss.
        """
        value = self.graph.value[name]
        owner = value.path.rpartition(".")[0]
        if value.kind != "parameter" or not owner or owner != task.path or owner in self.kinds:
            return False
        return self.readers[value.storage] == {owner}

    @cached_property
    def readers(self) -> dict[str, set[str]]:
        """Storage to the modules whose tasks read it."""
        found: dict[str, set[str]] = defaultdict(set)
        for task in self.graph.tasks:
            for name in task.inputs:
                found[self.graph.value[name].storage].add(task.path)
        return found

    def summed(self, axis: int) -> list[str]:
        """Parameters that meet a part of the axis whole."""
        names = set(self.touching[axis])
        return [
            self.graph.value[name].path
            for task in self.graph.tasks
            if names & set(task.outputs)
            for name in task.inputs
            if name not in names and self.trains(task, name) and self.is_own(task, name)
        ]

    def whole_too(self, axis: int, parameters: Sequence[str]) -> str:
        """One of these parameters that also meets whole tensors, whose gradient must not be summed; "" for none."""
        names = set(self.touching[axis])
        for task in self.graph.tasks:
            for name in task.inputs:
                path = self.graph.value[name].path
                if path in parameters and not names & set(task.outputs):
                    return path
        return ""

    def is_swapped(self, task: Task) -> bool:
        """Whether a task is part of a layer that `adapt/` swaps as a whole."""
        return self.kinds.get(task.path) in ("linear", "transposed") and bool(self.products[task.path])

    def sums(self, axis: int) -> tuple[Formula, Formula, tuple[int, int]]:
        """Elements summed in a forward and in a backward, and the number of sums of each."""
        value = self.graph.value
        rows, sources = [], {}
        for module, tasks in self.products.items():
            inputs, outputs = self.sides(module)
            if axis in inputs:
                rows += [value[task.outputs[0]].numel for task in tasks]
            if axis in outputs:
                sources.update({self.source(task): task for task in tasks})
        needed = [value[name].numel for name in sources if value[name].requires_grad]
        return total(rows), total(needed), (len(rows), len(needed))

    def source(self, task: Task) -> str:
        """The tensor that a layer is given: what its product reads, before views of its own."""
        graph = self.graph
        name = task.inputs[0] if task.op == _PRODUCTS[0] else _second(task)
        while name in graph.producer and graph.tasks[graph.producer[name]].path == task.path:
            name = graph.tasks[graph.producer[name]].inputs[0]
        return name

    def heads(self, axis: int) -> int:
        """Heads of each unit in the second of four dims; the most that any tensor has, which are the queries'."""
        counts = [
            self.axes.extent(dims[1]) // self.size(axis)
            for name in self.touching[axis]
            if len(dims := self.dims[name]) == 4 and axis in dims[1]
        ]
        return max(counts, default=0)


def _second(task: Task) -> str:
    part = task.arguments[1]
    assert isinstance(part, Ref)
    return part.name
