"""From an axis that is cut to what `adapt/` carries out: layers, parameters and shapes that code names.

Owns the translation. Must not know why the axis was chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.graph.task_graph import Task
from meshwright.partitioning.axis_facts import AxisFacts
from meshwright.partitioning.tensor_regions import (
    Column,
    OtherCut,
    Region,
    Row,
    ShapeCall,
    ShapeKind,
    Size,
)

_SHAPE_KINDS: Mapping[str, ShapeKind] = {
    **dict.fromkeys(("view", "reshape", "unflatten", "_unsafe_view"), "view"),
    "expand": "expand",
    **dict.fromkeys(("split", "split_with_sizes"), "split"),
    **dict.fromkeys(("zeros", "ones", "full", "new_zeros", "new_ones"), "make"),
}


def region_of(facts: AxisFacts, axis: int) -> Region:
    """The region of an axis."""
    columns: list[Column] = []
    rows: list[Row] = []
    numbers: dict[str, int] = {}
    for module, tasks in facts.products.items():
        inputs, outputs = facts.sides(module)
        if axis in outputs:
            source = numbers.setdefault(facts.source(tasks[0]), len(numbers))
            columns.append(Column(module, facts.part(outputs, axis), source))
        if axis in inputs:
            rows.append(Row(module, facts.part(inputs, axis)))
    forward, backward, num_sums = facts.sums(axis)
    return Region(
        units=facts.size(axis),
        heads=facts.heads(axis),
        columns=tuple(columns),
        rows=tuple(rows),
        others=tuple(_other_cuts(facts, axis, {c.module for c in columns} | {r.module for r in rows})),
        summed=tuple(dict.fromkeys(facts.summed(axis))),
        shapes=tuple(dict.fromkeys(_shape_calls(facts, axis))),
        forward_numel=forward,
        backward_numel=backward,
        num_sums=num_sums,
    )


def _other_cuts(facts: AxisFacts, axis: int, layers: set[str]) -> list[OtherCut]:
    found = []
    for name in facts.touching[axis]:
        value = facts.graph.value[name]
        if value.kind == "parameter" and value.path.rpartition(".")[0] not in layers:
            dims = facts.dims[name]
            at = next(i for i, dim in enumerate(dims) if axis in dim)
            found.append(OtherCut(value.path, at, facts.part(dims[at], axis)))
    return found


def _shape_calls(facts: AxisFacts, axis: int) -> list[ShapeCall]:
    found = []
    for task in facts.graph.tasks:
        kind = _SHAPE_KINDS.get(task.op.removeprefix("aten.").partition(".")[0])
        outputs = [name for name in task.outputs if name and any(axis in dim for dim in facts.dims[name])]
        if kind is None or not outputs or facts.is_swapped(task):
            continue
        source = () if kind == "make" else _size_of(facts, task.inputs[0], axis)
        sizes = _size_of(facts, outputs[0], axis)
        if kind == "split":
            at = next(i for i, size in enumerate(source) if size.is_cut)
            sizes = tuple(_size_of(facts, name, axis)[at] for name in task.outputs if name)
        found.append(ShapeCall(task.path, kind, source, sizes, _names(task, sizes)))
    return found


def _size_of(facts: AxisFacts, name: str, axis: int) -> tuple[Size, ...]:
    graph = facts.graph
    # A size of the batch that the graph holds fixed is still none of the model.
    fixed = {n for key, n in (("batch", graph.batch), ("sequence", graph.sequence)) if key not in graph.free}
    return tuple(
        Size(None if extent.constant in fixed and axis not in dim else extent.constant, axis in dim)
        for extent, dim in zip(graph.value[name].shape, facts.dims[name], strict=True)
    )


def _names(task: Task, sizes: Sequence[Size]) -> bool:
    """Whether a size that is cut stands in the call itself, and no -1 in its place."""
    named = next((part for part in task.arguments if isinstance(part, tuple)), ())
    if len(named) != len(sizes):
        return True
    return any(size.is_cut and part != -1 for size, part in zip(sizes, named, strict=True))
