"""What the tasks of a graph cost: FLOPs, bytes moved, and what autograd keeps, as formulas of batch and sequence.

Owns the two passes. One executes the whole graph once on tensors without memory and sees which storage each value
lives in and which storages autograd saves. The other executes each *kind* of task (op, arguments, shapes) at some
sizes and fits its FLOPs and its inner memory; a model of many equal layers has few kinds.
Source of FLOPs: torch's counter, with formulas for the kernels that it lacks. Elementwise work counts zero.
Simplification: kernels are those that a CPU chooses; attention without dropout then keeps its log-sum-exp, not its
scores, as on GPUs, and attention with dropout keeps all scores, which GPUs do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from meshwright.capture.encode import NotPolynomialError
from meshwright.capture.kernels import flop_formulas
from meshwright.capture.run import Resolver
from meshwright.graph.formula import ZERO, Formula, fit, total
from meshwright.graph.task_graph import Ref, Task, TaskGraph, Value

_BATCHES = (2, 3)
_SEQUENCES = (8, 16, 24)
_CHECK = (5, 40)
_ATTENTION = "aten.scaled_dot_product_attention.default"


@dataclass(frozen=True)
class _Seen:
    """What one execution of a task shows."""

    flops: int
    backward_flops: int
    inner_bytes: int


class _Keeping:
    """Collects the storages that autograd saves."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def pack(self, x: Tensor) -> Tensor:
        self.tensors.append(x)
        return x

    def take(self) -> list[Tensor]:
        found, self.tensors = self.tensors, []
        return found


def _identity(x: Tensor) -> Tensor:
    return x


def with_costs(graph: TaskGraph) -> TaskGraph:
    """The graph with storages, gradients, FLOPs and bytes filled in.

    Raises:
        NotPolynomialError: a cost is no polynomial in a free size.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph, layouts = _with_storages(graph)
        kinds: dict[Any, tuple[Formula, Formula, Formula]] = {}
        tasks = []
        for task in graph.tasks:
            key = _kind_of(graph, task, layouts)
            if key not in kinds:
                kinds[key] = _fitted(graph, task, layouts)
            tasks.append(_priced(graph, task, kinds[key]))
    return dataclasses.replace(graph, tasks=tuple(tasks))


# Dims of a value from the longest stride to the shortest, and which of them are expanded.
Layout = tuple[tuple[int, ...], tuple[int, ...]]


def _with_storages(graph: TaskGraph) -> tuple[TaskGraph, dict[str, Layout]]:
    """Execute the whole graph once: storages, layouts, `requires_grad`, and values that autograd saves."""
    sizes = (graph.batch, graph.sequence)
    tensors: dict[str, Any] = {}
    roots: dict[int, str] = {}
    changed: dict[str, Value] = dict(graph.value)
    for value in graph.values:
        if value.kind != "activation":
            source = tensors.get(value.storage)
            tensors[value.name] = _blank(value, sizes) if source is None else source
            roots[_storage(tensors[value.name])] = value.storage or value.name
            changed[value.name] = dataclasses.replace(value, storage=value.storage or value.name)
    keeping, resolve, saved = _Keeping(), Resolver(sizes, torch.device("cpu")), []
    with saved_tensors_hooks(keeping.pack, _identity), torch.enable_grad():
        for task in graph.tasks:
            results = resolve.call(task, tensors)
            for name, x in zip(task.outputs, results, strict=True):
                if name:
                    tensors[name] = x
                    storage = roots.setdefault(_storage(x), name)
                    changed[name] = dataclasses.replace(
                        changed[name], storage=storage, requires_grad=x.requires_grad
                    )
            kept = dict.fromkeys(roots[_storage(x)] for x in keeping.take() if _storage(x) in roots)
            saved.append(tuple(kept))
    tasks = [dataclasses.replace(task, saved=names) for task, names in zip(graph.tasks, saved, strict=True)]
    layouts = {name: _layout_of(x) for name, x in tensors.items() if isinstance(x, Tensor)}
    return dataclasses.replace(graph, values=tuple(changed.values()), tasks=tuple(tasks)), layouts


def _layout_of(x: Tensor) -> Layout:
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: (-strides[dim], dim))
    return tuple(order), tuple(dim for dim in order if strides[dim] == 0 and x.shape[dim] > 1)


def _fitted(graph: TaskGraph, task: Task, layouts: Mapping[str, Layout]) -> tuple[Formula, Formula, Formula]:
    """FLOPs, backward FLOPs and inner bytes of a kind of task."""
    uses = _sizes_used(graph, task)
    batches = _BATCHES if "batch" in uses else (graph.batch,)
    sequences = _SEQUENCES if "sequence" in uses else (graph.sequence,)
    check = (
        _CHECK[0] if "batch" in uses else graph.batch,
        _CHECK[1] if "sequence" in uses else graph.sequence,
    )
    seen: dict[tuple[int, int], _Seen] = {}

    def measure(attribute: str) -> Formula:
        def measured(batch: int, sequence: int) -> int:
            if (batch, sequence) not in seen:
                seen[batch, sequence] = _measure(graph, task, (batch, sequence), layouts)
            return int(getattr(seen[batch, sequence], attribute))

        found = fit(measured, batches, sequences, check)
        if found is None:
            raise NotPolynomialError(f"{attribute} of {task.op} ({task.name})")
        return found

    return measure("flops"), measure("backward_flops"), measure("inner_bytes")


def _measure(graph: TaskGraph, task: Task, sizes: tuple[int, int], layouts: Mapping[str, Layout]) -> _Seen:
    """Execute one task, and its backward, on tensors without memory."""
    tensors = {name: _blank(graph.value[name], sizes, layouts[name]) for name in task.inputs}
    leaves = [x for x in tensors.values() if x.requires_grad]
    if task.mutates:  # a leaf cannot be changed in place
        tensors = {name: x.clone() if x.requires_grad else x for name, x in tensors.items()}
    keeping = _Keeping()
    with (
        saved_tensors_hooks(keeping.pack, _identity),
        torch.enable_grad(),
        FlopCounterMode(display=False, custom_mapping=dict(flop_formulas())) as counter,
    ):
        results = Resolver(sizes, torch.device("cpu")).call(task, tensors)
        outputs = [x for x in results if isinstance(x, Tensor)]
        forward = counter.get_total_flops()
        known = {_storage(x) for x in (*tensors.values(), *outputs)}
        inner = {_storage(x): x.untyped_storage().nbytes() for x in keeping.take()}
        ends = [x for x in outputs if x.requires_grad]
        if ends and leaves:
            torch.autograd.grad(ends, leaves, [torch.ones_like(x) for x in ends], allow_unused=True)
        both = counter.get_total_flops()
    inner_bytes = sum(count for storage, count in inner.items() if storage not in known)
    return _Seen(int(forward), int(both - forward), inner_bytes)


def _priced(graph: TaskGraph, task: Task, fitted: tuple[Formula, Formula, Formula]) -> Task:
    flops, backward, inner = fitted
    inputs = [graph.value[name] for name in task.inputs]
    outputs = [graph.value[name] for name in task.outputs if name]
    owned = [value for value in outputs if value.storage == value.name]
    is_view = outputs and not owned and not task.mutates
    return dataclasses.replace(
        task,
        flops=flops,
        backward_flops=backward,
        causal_flops=flops if _is_causal(task) else ZERO,
        read_bytes=ZERO if is_view else total(value.bytes for value in inputs),
        written_bytes=total(value.bytes for value in [*owned, *(graph.value[n] for n in task.mutates)]),
        saved_bytes=inner,
    )


def _is_causal(task: Task) -> bool:
    if task.op != _ATTENTION:
        return False
    return dict(task.keywords).get("is_causal", task.arguments[5:6] == (True,)) is True


def _kind_of(graph: TaskGraph, task: Task, layouts: Mapping[str, Layout]) -> Any:
    """Tasks of one kind cost the same."""
    order = {name: i for i, name in enumerate(task.inputs)}

    def anonymous(part: Any) -> Any:
        if isinstance(part, Ref):
            return ("value", order[part.name])
        return tuple(anonymous(inner) for inner in part) if isinstance(part, tuple) else (type(part), part)

    shapes = tuple(
        (value.shape, value.dtype, value.requires_grad, layouts[value.name])
        for value in map(graph.value.__getitem__, task.inputs)
    )
    return task.op, anonymous(task.arguments), anonymous(task.keywords), shapes, task.is_detached


def _sizes_used(graph: TaskGraph, task: Task) -> frozenset[str]:
    """Free sizes that shapes or arguments depend on."""
    found: set[str] = set()
    for name in (*task.inputs, *(name for name in task.outputs if name)):
        for extent in graph.value[name].shape:
            found |= extent.uses
    for part in pytree.tree_leaves((task.arguments, task.keywords)):
        if isinstance(part, Formula):
            found |= part.uses
    return frozenset(found)


def _blank(value: Value, sizes: Sequence[int], layout: Layout | None = None) -> Tensor:
    """A tensor without memory like `value`, its dims in memory in the order of `layout`."""
    batch, sequence = sizes
    shape = [extent(batch, sequence) for extent in value.shape]
    order, expanded = layout or (tuple(range(len(shape))), ())
    stored = [1 if dim in expanded else shape[dim] for dim in order]
    x = torch.empty(stored, dtype=getattr(torch, value.dtype), requires_grad=value.requires_grad)
    back = [order.index(dim) for dim in range(len(shape))]
    return x if not shape else x.detach().permute(back).expand(shape).requires_grad_(value.requires_grad)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
