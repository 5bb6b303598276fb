"""From a captured graph to the layers that tensor-parallel ranks share: `derive_layout`.

Method: every dim of every tensor becomes a product of axes (`axis_rules.py`). An axis can be cut where nothing needs it
whole, only layers sum over it, and no tensor that trains meets a part of it uncut. No two axes that are cut may meet in
one tensor. Of the sets of axes that are left, the one is taken that shares the most FLOPs, and of several such the one
that communicates least; blocks that repeat have the same axes, so they get the same answer. Vocabularies come first: a
table that the batch looks up, and the layer that the loss reads.

Simplification: sets of more than `_MOST_EXACT` axes that exclude each other are chosen greedily.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.graph.formula import ZERO, Formula, total
from meshwright.graph.task_graph import Ref, Task, TaskGraph
from meshwright.partitioning.axes import Dim
from meshwright.partitioning.axis_rules import Propagation
from meshwright.partitioning.tensor_regions import (
    Column,
    DerivedLayout,
    LayerKind,
    OtherCut,
    Part,
    Region,
    Row,
    ShapeCall,
    ShapeKind,
    Size,
)

_MOST_EXACT = 16
_LOSSES = ("aten.cross_entropy_loss", "aten.nll_loss", "aten.log_softmax")
_PRODUCTS = ("aten.linear.default", "aten.addmm.default")
_SHAPE_KINDS: Mapping[str, ShapeKind] = {
    **dict.fromkeys(("view", "reshape", "unflatten", "_unsafe_view"), "view"),
    "expand": "expand",
    **dict.fromkeys(("split", "split_with_sizes"), "split"),
    **dict.fromkeys(("zeros", "ones", "full", "new_zeros", "new_ones"), "make"),
}


def derive_layout(graph: TaskGraph, kinds: Mapping[str, LayerKind], num_ranks: int) -> DerivedLayout:
    """The layers to cut.

    Args:
        graph: captured by torch.export, with costs.
        kinds: the layers that can be cut, by module name, each with a parameter `weight`.
        num_ranks: that share them; fewer heads than ranks are found all the same, fewer channels are not.
    """
    found = Propagation(graph)
    found.run()
    return _Search(found, kinds, num_ranks).result()


@dataclass
class _Search:
    """The axes of one graph, and which of them may be cut."""

    found: Propagation
    kinds: Mapping[str, LayerKind]
    num_ranks: int
    reasons: dict[int, str] = field(default_factory=dict)
    losses: set[int] = field(default_factory=set)
    lookups: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        graph, axes = self.found.graph, self.found.axes
        self.dims: dict[str, list[Dim]] = {
            name: [axes.leaves(dim) for dim in dims] for name, dims in self.found.dims.items()
        }
        self.touching: dict[int, list[str]] = defaultdict(list)
        for name, dims in self.dims.items():
            for axis in dict.fromkeys(axis for dim in dims for axis in dim):
                self.touching[axis].append(name)
                if sum(dim.count(axis) for dim in dims) > 1:
                    self.reasons.setdefault(axis, f"{self._called(name)} has it twice")
        for dim, reason, number in self.found.whole:
            for axis in axes.leaves(dim):
                self.reasons.setdefault(axis, reason)
                if graph.tasks[number].op.startswith(_LOSSES):
                    self.losses.add(axis)
        for dim, number in self.found.sums:
            if not self._is_layer(graph.tasks[number]):
                for axis in axes.leaves(dim):
                    self.reasons.setdefault(axis, self._sum_reason(graph.tasks[number]))
        for dim, number in self.found.lookups:
            for axis in axes.leaves(dim):
                self.lookups[axis].append(graph.tasks[number].path)

    # What the graph says of tasks and values.

    def _called(self, name: str) -> str:
        value = self.found.graph.value[name]
        return value.path or f"a tensor of {self._path_of(name)}"

    def _path_of(self, name: str) -> str:
        producer = self.found.graph.producer.get(name)
        return "the batch" if producer is None else self.found.graph.tasks[producer].path or "the root module"

    def _weight_of(self, task: Task) -> str:
        """The value that a product has as weight; "" for another task."""
        if task.op not in _PRODUCTS:
            return ""
        part = task.arguments[1 if task.op == _PRODUCTS[0] else 2]
        return part.name if isinstance(part, Ref) else ""

    def _is_layer(self, task: Task) -> bool:
        """A product of a layer that can be swapped, with the layer's own weight."""
        weight = self._weight_of(task)
        wanted = "linear" if task.op == _PRODUCTS[0] else "transposed"
        if not weight or self.kinds.get(task.path) != wanted:
            return False
        value = self.found.graph.value[weight]
        own = self._weights[task.path]
        return value.kind == "parameter" and value.storage == self.found.graph.value[own].storage

    @cached_property
    def _weights(self) -> dict[str, str]:
        """Layer to the value that is its weight."""
        by_path = {v.path: v.name for v in self.found.graph.values if v.kind == "parameter"}
        layers = [name for name in self.kinds if f"{name}.weight" in by_path]
        return defaultdict(str, {name: by_path[f"{name}.weight"] for name in layers})

    def _sum_reason(self, task: Task) -> str:
        where = task.path or "the root module"
        for name in task.inputs:
            if self.found.graph.value[name].kind == "parameter":
                return f"{self._called(name)} is multiplied by code of {where}, not by a layer"
        return f"{task.op.removeprefix('aten.').partition('.')[0]} in {where} sums over it"

    @cached_property
    def _products(self) -> dict[str, list[Task]]:
        """Layer to its tasks."""
        found: dict[str, list[Task]] = defaultdict(list)
        for task in self.found.graph.tasks:
            if self._is_layer(task):
                found[task.path].append(task)
        return found

    def _sides(self, module: str) -> tuple[Dim, Dim]:
        """(inputs, outputs) of a layer's weight."""
        first, second = self.dims[self._weights[module]]
        return (second, first) if self.kinds[module] == "linear" else (first, second)

    def _size(self, axis: int) -> int:
        return self.found.axes.extent((axis,))

    def _part(self, dim: Dim, axis: int) -> Part:
        at = dim.index(axis)
        return Part(self.found.axes.extent(dim[:at]), self.found.axes.extent(dim[at + 1 :]))

    # What may be cut.

    def result(self) -> DerivedLayout:
        """The choice."""
        tables, heads, taken = self._vocabularies()
        layers = [name for name in self._products if name not in heads]
        axes = dict.fromkeys(axis for name in layers for side in self._sides(name) for axis in side)
        for axis in axes:
            if axis not in self.reasons:
                problem = self._problem(axis)
                if problem:
                    self.reasons[axis] = problem
        free = [axis for axis in axes if axis not in self.reasons and axis not in taken]
        chosen = [axis for axis in self._chosen(free, taken) if self._is_of_use(axis)]
        return DerivedLayout(
            tuple(self._region(axis) for axis in chosen),
            tables,
            heads,
            self._whole({*chosen, *taken}, heads, tables),
        )

    def _vocabularies(self) -> tuple[tuple[str, ...], tuple[str, ...], set[int]]:
        """Tables that the batch looks up, layers that the loss reads, and their axes."""
        taken: set[int] = set()
        tables: dict[str, None] = {}
        for axis, modules in self.lookups.items():
            rows, columns = self._table_sizes(modules[0], axis)
            batch_reads = self._reads_batch(modules)
            if (
                rows >= max(columns, self.num_ranks)
                and columns
                and batch_reads
                and all(self.kinds.get(m) == "table" for m in modules)
            ):
                taken.add(axis)
                tables.update(dict.fromkeys(modules))
            else:
                self.reasons.setdefault(
                    axis, "few or fixed rows are looked up" if rows else "it is looked up by code"
                )
        heads: list[str] = []
        for module in self._products:
            inputs, outputs = self._sides(module)
            if len(outputs) != 1 or outputs[0] not in self.losses:
                continue
            tied = outputs[0] in self.lookups
            if outputs[0] in taken or (not tied and self._size(outputs[0]) >= self.found.axes.extent(inputs)):
                taken.add(outputs[0])
                heads.append(module)
        return tuple(tables), tuple(heads), taken

    def _table_sizes(self, module: str, axis: int) -> tuple[int, int]:
        if self.kinds.get(module) != "table":
            return 0, 0
        rows, columns = self.dims[self._weights[module]]
        return (self._size(axis), self.found.axes.extent(columns)) if rows == (axis,) else (0, 0)

    def _reads_batch(self, modules: Sequence[str]) -> bool:
        """Whether what the tables look up comes from the batch itself."""
        graph = self.found.graph
        open_names = [
            task.inputs[1] for task in graph.tasks if task.path in modules and "embedding" in task.op
        ]
        seen: set[str] = set()
        while open_names:
            name = open_names.pop()
            if name in seen:
                continue
            seen.add(name)
            if graph.value[name].kind == "input":
                return True
            if name in graph.producer:
                open_names += graph.tasks[graph.producer[name]].inputs
        return False

    def _problem(self, axis: int) -> str:
        """Why a part of an axis cannot be had; "" where it can."""
        if axis in self.lookups:
            return "rows of a table are looked up by it"
        if self._size(axis) < self.num_ranks and not self._heads(axis):
            return f"{self._size(axis)} are fewer than {self.num_ranks} ranks"
        graph, names = self.found.graph, set(self.touching[axis])
        if any(isinstance(out, Ref) and out.name in names for out in graph.outputs):
            return "the loss returns it"
        for task in graph.tasks:
            if self._is_swapped(task) or not names & set(task.outputs):
                continue
            for name in task.inputs:
                if name not in names and self._trains(task, name) and not self._is_own(task, name):
                    return f"{self._called(name)} trains on every rank and meets a part of it"
            if task.is_random and not self._draws_by_place(task, axis):
                return f"{task.path} draws random numbers for a part of unknown place"
        mixed = self._whole_too(axis, self._summed(axis))
        return f"{mixed} meets parts and wholes" if mixed else ""

    def _trains(self, task: Task, name: str) -> bool:
        return self.found.graph.value[name].requires_grad and not task.is_detached

    def _is_own(self, task: Task, name: str) -> bool:
        """A parameter that only its own module reads, so that its forward can sum the gradients of its parts.

        Not one of the root: its tasks are not told from those of the loss.
        """
        value = self.found.graph.value[name]
        owner = value.path.rpartition(".")[0]
        if value.kind != "parameter" or not owner or owner != task.path or owner in self.kinds:
            return False
        return self._readers[value.storage] == {owner}

    @cached_property
    def _readers(self) -> dict[str, set[str]]:
        """Storage to the modules whose tasks read it."""
        found: dict[str, set[str]] = defaultdict(set)
        for task in self.found.graph.tasks:
            for name in task.inputs:
                found[self.found.graph.value[name].storage].add(task.path)
        return found

    def _summed(self, axis: int) -> list[str]:
        """Parameters that meet a part of the axis whole."""
        names = set(self.touching[axis])
        return [
            self.found.graph.value[name].path
            for task in self.found.graph.tasks
            if names & set(task.outputs)
            for name in task.inputs
            if name not in names and self._trains(task, name) and self._is_own(task, name)
        ]

    def _whole_too(self, axis: int, parameters: Sequence[str]) -> str:
        """One of these parameters that also meets whole tensors, whose gradient must not be summed; "" for none."""
        names = set(self.touching[axis])
        for task in self.found.graph.tasks:
            for name in task.inputs:
                path = self.found.graph.value[name].path
                if path in parameters and not names & set(task.outputs):
                    return path
        return ""

    def _is_swapped(self, task: Task) -> bool:
        return self.kinds.get(task.path) in ("linear", "transposed") and bool(self._products[task.path])

    def _draws_by_place(self, task: Task, axis: int) -> bool:
        """What `CutRegion` can tell: the second of four dims, or the last one, and nothing else in it."""
        dims = self.dims[task.inputs[0]]
        at = next((i for i, dim in enumerate(dims) if axis in dim), 0)
        outer = dims[at].index(axis)
        return outer == 0 and (at == len(dims) - 1 or (at == 1 and len(dims) == 4))

    def _is_of_use(self, axis: int) -> bool:
        return any(axis in self._sides(name)[0] for name in self._products)

    # Which of them are cut.

    def _chosen(self, free: Sequence[int], taken: Iterable[int]) -> list[int]:
        together: dict[int, set[int]] = {axis: set() for axis in free}
        blocked: set[int] = set()
        for dims in self.dims.values():
            present = {axis for dim in dims for axis in dim}
            here = present & together.keys()
            if present & set(taken):
                blocked |= here
            for axis in here:
                together[axis] |= here - {axis}
        for axis in blocked:
            self.reasons[axis] = "it meets a vocabulary that is cut"
        left = {axis: others - blocked for axis, others in together.items() if axis not in blocked}
        weights = {axis: self._worth(axis) for axis in left}
        chosen: set[int] = set()
        for component in _components(left):
            chosen |= _best_set(component, left, weights)
        for axis in left.keys() - chosen:
            self.reasons[axis] = "the layers beside it are cut"
        return [axis for axis in free if axis in chosen]

    def _worth(self, axis: int) -> tuple[int, int]:
        """(FLOPs that ranks share, elements that they need not sum)."""
        graph, names = self.found.graph, set(self.touching[axis])
        sizes = (graph.batch, graph.sequence)
        shared = [
            task for task in graph.tasks if task.flops != ZERO and names & {*task.inputs, *task.outputs}
        ]
        forward, backward, _ = self._sums(axis)
        return sum(task.flops(*sizes) for task in shared), -(forward + backward)(*sizes)

    def _sums(self, axis: int) -> tuple[Formula, Formula, tuple[int, int]]:
        """Elements summed in a forward and in a backward, and the number of sums of each."""
        value = self.found.graph.value
        rows, sources = [], {}
        for module, tasks in self._products.items():
            inputs, outputs = self._sides(module)
            if axis in inputs:
                rows += [value[task.outputs[0]].numel for task in tasks]
            if axis in outputs:
                sources.update({self._source(task): task for task in tasks})
        needed = [value[name].numel for name in sources if value[name].requires_grad]
        return total(rows), total(needed), (len(rows), len(needed))

    def _source(self, task: Task) -> str:
        """The tensor that a layer is given: what its product reads, before views of its own."""
        graph = self.found.graph
        name = task.inputs[0] if task.op == _PRODUCTS[0] else _second(task)
        while name in graph.producer and graph.tasks[graph.producer[name]].path == task.path:
            name = graph.tasks[graph.producer[name]].inputs[0]
        return name

    # What becomes of them.

    def _region(self, axis: int) -> Region:
        columns: list[Column] = []
        rows: list[Row] = []
        numbers: dict[str, int] = {}
        for module, tasks in self._products.items():
            inputs, outputs = self._sides(module)
            if axis in outputs:
                source = numbers.setdefault(self._source(tasks[0]), len(numbers))
                columns.append(Column(module, self._part(outputs, axis), source))
            if axis in inputs:
                rows.append(Row(module, self._part(inputs, axis)))
        forward, backward, num_sums = self._sums(axis)
        return Region(
            units=self._size(axis),
            heads=self._heads(axis),
            columns=tuple(columns),
            rows=tuple(rows),
            others=tuple(self._other_cuts(axis, {c.module for c in columns} | {r.module for r in rows})),
            summed=tuple(dict.fromkeys(self._summed(axis))),
            shapes=tuple(dict.fromkeys(self._shape_calls(axis))),
            forward_numel=forward,
            backward_numel=backward,
            num_sums=num_sums,
        )

    def _heads(self, axis: int) -> int:
        """Heads of each unit in the second of four dims; the most that any tensor has, which are the queries'."""
        counts = [
            self.found.axes.extent(dims[1]) // self._size(axis)
            for name in self.touching[axis]
            if len(dims := self.dims[name]) == 4 and axis in dims[1]
        ]
        return max(counts, default=0)

    def _other_cuts(self, axis: int, layers: set[str]) -> list[OtherCut]:
        found = []
        for name in self.touching[axis]:
            value = self.found.graph.value[name]
            if value.kind == "parameter" and value.path.rpartition(".")[0] not in layers:
                dims = self.dims[name]
                at = next(i for i, dim in enumerate(dims) if axis in dim)
                found.append(OtherCut(value.path, at, self._part(dims[at], axis)))
        return found

    def _shape_calls(self, axis: int) -> list[ShapeCall]:
        found = []
        for task in self.found.graph.tasks:
            kind = _SHAPE_KINDS.get(task.op.removeprefix("aten.").partition(".")[0])
            outputs = [name for name in task.outputs if name and any(axis in dim for dim in self.dims[name])]
            if kind is None or not outputs or self._is_swapped(task):
                continue
            source = () if kind == "make" else self._size_of(task.inputs[0], axis)
            sizes = self._size_of(outputs[0], axis)
            if kind == "split":
                at = next(i for i, size in enumerate(source) if size.is_cut)
                sizes = tuple(self._size_of(name, axis)[at] for name in task.outputs if name)
            found.append(ShapeCall(task.path, kind, source, sizes, _names(task, sizes)))
        return found

    def _size_of(self, name: str, axis: int) -> tuple[Size, ...]:
        graph = self.found.graph
        # A size of the batch that the graph holds fixed is still none of the model.
        fixed = {
            n for key, n in (("batch", graph.batch), ("sequence", graph.sequence)) if key not in graph.free
        }
        return tuple(
            Size(None if extent.constant in fixed and axis not in dim else extent.constant, axis in dim)
            for extent, dim in zip(graph.value[name].shape, self.dims[name], strict=True)
        )

    def _whole(self, cut: set[int], heads: Sequence[str], tables: Sequence[str]) -> dict[str, str]:
        """Layers that no axis cuts, with the reasons."""
        found = {}
        for module, kind in self.kinds.items():
            if not self._weights[module] or module in heads or module in tables:
                continue
            inputs, outputs = self._sides(module) if kind != "table" else self.dims[self._weights[module]]
            if cut & {*inputs, *outputs}:
                continue
            words = ("rows", "columns") if kind == "table" else ("inputs", "outputs")
            why = [
                f"{word}: {self._reason(dim)}"
                for word, dim in zip(words, (inputs, outputs), strict=True)
                if dim
            ]
            found[module] = "; ".join(why[::-1])
        return found

    def _reason(self, dim: Dim) -> str:
        largest = max(dim, key=self._size)
        return self.reasons.get(largest, "no layer sums over it")


def _names(task: Task, sizes: Sequence[Size]) -> bool:
    """Whether a size that is cut stands in the call itself, and no -1 in its place."""
    named = next((part for part in task.arguments if isinstance(part, tuple)), ())
    if len(named) != len(sizes):
        return True
    return any(size.is_cut and part != -1 for size, part in zip(sizes, named, strict=True))


def _second(task: Task) -> str:
    part = task.arguments[1]
    assert isinstance(part, Ref)
    return part.name


def _components(together: Mapping[int, set[int]]) -> list[list[int]]:
    """Axes in groups that exclude each other, directly or by others."""
    left, found = dict.fromkeys(together), []
    while left:
        group, open_axes = [], [next(iter(left))]
        while open_axes:
            axis = open_axes.pop()
            if axis in left:
                del left[axis]
                group.append(axis)
                open_axes += together[axis]
        found.append(sorted(group))
    return found


def _best_set(
    group: Sequence[int], together: Mapping[int, set[int]], worth: Mapping[int, tuple[int, int]]
) -> set[int]:
    """The axes of a group, none of which excludes another, that are worth most together."""
    if len(group) > _MOST_EXACT:
        chosen: set[int] = set()
        for axis in sorted(group, key=lambda a: worth[a], reverse=True):
            if not together[axis] & chosen:
                chosen.add(axis)
        return chosen
    best, best_worth = set[int](), (0, 0)
    for mask in range(1, 1 << len(group)):
        picked = {axis for i, axis in enumerate(group) if mask >> i & 1}
        if any(together[axis] & picked for axis in picked):
            continue
        value = (sum(worth[a][0] for a in picked), sum(worth[a][1] for a in picked))
        if value > best_worth:
            best, best_worth = picked, value
    return best
