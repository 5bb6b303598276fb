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

from meshwright.graph.formula import ZERO
from meshwright.graph.task_graph import Ref, Task, TaskGraph
from meshwright.partitioning.axes import Dim
from meshwright.partitioning.axis_facts import AxisFacts
from meshwright.partitioning.axis_propagation import Propagation
from meshwright.partitioning.axis_rules import RULES
from meshwright.partitioning.derived_regions import region_of
from meshwright.partitioning.tensor_regions import DerivedLayout, LayerKind

_MOST_EXACT = 16
_LOSSES = ("aten.cross_entropy_loss", "aten.nll_loss", "aten.log_softmax")


def derive_layout(graph: TaskGraph, kinds: Mapping[str, LayerKind], num_ranks: int) -> DerivedLayout:
    """The layers to cut.

    Args:
        graph: captured by torch.export, with costs.
        kinds: the layers that can be cut, by module name, each with a parameter `weight`.
        num_ranks: that share them; fewer heads than ranks are found all the same, fewer channels are not.
    """
    found = Propagation(graph, RULES)
    found.run()
    return _Search(AxisFacts(found, kinds), num_ranks).result()


@dataclass
class _Search:
    """The axes of one graph, and which of them may be cut."""

    facts: AxisFacts
    num_ranks: int
    reasons: dict[int, str] = field(default_factory=dict)
    losses: set[int] = field(default_factory=set)
    lookups: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        graph, axes = self.facts.graph, self.facts.axes
        for axis, names in self.facts.touching.items():
            for name in names:
                if sum(dim.count(axis) for dim in self.facts.dims[name]) > 1:
                    self.reasons.setdefault(axis, f"{self.facts.called(name)} has it twice")
        for dim, reason, number in self.facts.found.whole:
            for axis in axes.leaves(dim):
                self.reasons.setdefault(axis, reason)
                if graph.tasks[number].op.startswith(_LOSSES):
                    self.losses.add(axis)
        for dim, number in self.facts.found.sums:
            if not self.facts.is_layer(graph.tasks[number]):
                for axis in axes.leaves(dim):
                    self.reasons.setdefault(axis, self._sum_reason(graph.tasks[number]))
        for dim, number in self.facts.found.lookups:
            for axis in axes.leaves(dim):
                self.lookups[axis].append(graph.tasks[number].path)

    def _sum_reason(self, task: Task) -> str:
        where = task.path or "the root module"
        for name in task.inputs:
            if self.facts.graph.value[name].kind == "parameter":
                return f"{self.facts.called(name)} is multiplied by code of {where}, not by a layer"
        return f"{task.op.removeprefix('aten.').partition('.')[0]} in {where} sums over it"

    # What may be cut.

    def result(self) -> DerivedLayout:
        """The choice."""
        tables, heads, taken = self._vocabularies()
        layers = [name for name in self.facts.products if name not in heads]
        axes = dict.fromkeys(axis for name in layers for side in self.facts.sides(name) for axis in side)
        for axis in axes:
            if axis not in self.reasons:
                problem = self._problem(axis)
                if problem:
                    self.reasons[axis] = problem
        free = [axis for axis in axes if axis not in self.reasons and axis not in taken]
        chosen = [axis for axis in self._chosen(free, taken) if self._is_of_use(axis)]
        return DerivedLayout(
            tuple(region_of(self.facts, axis) for axis in chosen),
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
                and all(self.facts.kinds.get(m) == "table" for m in modules)
            ):
                taken.add(axis)
                tables.update(dict.fromkeys(modules))
            else:
                self.reasons.setdefault(
                    axis, "few or fixed rows are looked up" if rows else "it is looked up by code"
                )
        heads: list[str] = []
        for module in self.facts.products:
            inputs, outputs = self.facts.sides(module)
            if len(outputs) != 1 or outputs[0] not in self.losses:
                continue
            tied = outputs[0] in self.lookups
            if outputs[0] in taken or (
                not tied and self.facts.size(outputs[0]) >= self.facts.axes.extent(inputs)
            ):
                taken.add(outputs[0])
                heads.append(module)
        return tuple(tables), tuple(heads), taken

    def _table_sizes(self, module: str, axis: int) -> tuple[int, int]:
        if self.facts.kinds.get(module) != "table":
            return 0, 0
        rows, columns = self.facts.dims[self.facts.weights[module]]
        return (self.facts.size(axis), self.facts.axes.extent(columns)) if rows == (axis,) else (0, 0)

    def _reads_batch(self, modules: Sequence[str]) -> bool:
        """Whether what the tables look up comes from the batch itself."""
        graph = self.facts.graph
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
        if self.facts.size(axis) < self.num_ranks and not self.facts.heads(axis):
            return f"{self.facts.size(axis)} are fewer than {self.num_ranks} ranks"
        graph, names = self.facts.graph, set(self.facts.touching[axis])
        if any(isinstance(out, Ref) and out.name in names for out in graph.outputs):
            return "the loss returns it"
        for task in graph.tasks:
            if self.facts.is_swapped(task) or not names & set(task.outputs):
                continue
            for name in task.inputs:
                if name not in names and self.facts.trains(task, name) and not self.facts.is_own(task, name):
                    return f"{self.facts.called(name)} trains on every rank and meets a part of it"
            if task.is_random and not self._draws_by_place(task, axis):
                return f"{task.path} draws random numbers for a part of unknown place"
        mixed = self.facts.whole_too(axis, self.facts.summed(axis))
        return f"{mixed} meets parts and wholes" if mixed else ""

    def _draws_by_place(self, task: Task, axis: int) -> bool:
        """What `CutRegion` can tell: the second of four dims, or the last one, and nothing else in it."""
        dims = self.facts.dims[task.inputs[0]]
        at = next((i for i, dim in enumerate(dims) if axis in dim), 0)
        outer = dims[at].index(axis)
        return outer == 0 and (at == len(dims) - 1 or (at == 1 and len(dims) == 4))

    def _is_of_use(self, axis: int) -> bool:
        return any(axis in self.facts.sides(name)[0] for name in self.facts.products)

    # Which of them are cut.

    def _chosen(self, free: Sequence[int], taken: Iterable[int]) -> list[int]:
        together: dict[int, set[int]] = {axis: set() for axis in free}
        blocked: set[int] = set()
        for dims in self.facts.dims.values():
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
        graph, names = self.facts.graph, set(self.facts.touching[axis])
        sizes = (graph.batch, graph.sequence)
        shared = [
            task for task in graph.tasks if task.flops != ZERO and names & {*task.inputs, *task.outputs}
        ]
        forward, backward, _ = self.facts.sums(axis)
        return sum(task.flops(*sizes) for task in shared), -(forward + backward)(*sizes)

    def _whole(self, cut: set[int], heads: Sequence[str], tables: Sequence[str]) -> dict[str, str]:
        """Layers that no axis cuts, with the reasons."""
        found = {}
        for module, kind in self.facts.kinds.items():
            if not self.facts.weights[module] or module in heads or module in tables:
                continue
            inputs, outputs = (
                self.facts.sides(module) if kind != "table" else self.facts.dims[self.facts.weights[module]]
            )
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
        largest = max(dim, key=self.facts.size)
        return self.reasons.get(largest, "no layer sums over it")


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
