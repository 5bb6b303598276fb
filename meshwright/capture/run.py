"""A task graph executed task by task with torch: the model again, from plain data.

Owns the way from an op's name and arguments to a call. Must not know how a graph was made. The graph holds no
parameters: they come from a model by their paths.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshwright.capture.export import on_device_of, sizes_of, tensors_of
from meshwright.errors import ConfigError
from meshwright.graph.formula import Formula
from meshwright.graph.task_graph import Argument, Ref, Symbol, Task, TaskGraph, Value


def run_graph(graph: TaskGraph, model: nn.Module, batch: Any) -> tuple[Any, ...]:
    """What the loss returns, computed task by task; autograd and in-place changes of buffers work as in the model.

    Args:
        graph: captured with torch.export.
        model: its parameters and buffers are used.
        batch: of any sizes that the graph leaves free.

    Raises:
        ConfigError: E134 for other sizes, E136 where the graph cannot be executed.
    """
    if graph.source != "torch.export":
        raise ConfigError(
            "E136", f"{graph.name} was read by {graph.source}: it tells costs, and cannot be executed"
        )
    batch = on_device_of(model, batch)
    sizes = sizes_of(batch)
    graph.check_sizes(sizes.batch, sizes.sequence)
    tensors = bind(graph, model, batch)
    device = next((x.device for x in tensors_of(batch)), torch.device("cpu"))
    resolve = Resolver((sizes.batch, sizes.sequence), device)
    last = graph.last_user
    for i, task in enumerate(graph.tasks):
        for name, result in zip(task.outputs, resolve.call(task, tensors), strict=True):
            if name:
                tensors[name] = result
        for name in task.inputs:
            if last[name] == i:
                del tensors[name]
    return tuple(resolve.argument(output, tensors) for output in graph.outputs)


def bind(graph: TaskGraph, model: nn.Module, batch: Any) -> dict[str, Any]:
    """Values that exist before the first task, by name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    inputs = iter(tensors_of(batch))
    found: dict[str, Any] = {}
    for value in graph.values:
        if value.kind == "parameter":
            found[value.name] = parameters[value.path]
        elif value.kind == "buffer":
            found[value.name] = buffers[value.path]
        elif value.kind == "input":
            found[value.name] = next(inputs)
        elif value.kind == "constant":
            found[value.name] = constant_of(graph, value)
    return found


def constant_of(graph: TaskGraph, value: Value) -> Tensor:
    """The tensor behind a constant's text."""
    if not value.data:
        raise ConfigError(
            "E136",
            f"{graph.name} was captured without memory, so its constant {value.path!r} has no values; capture it "
            f"with values, or make the constant a buffer of the model",
        )
    shape = [extent(0, 0) for extent in value.shape]
    return torch.tensor(json.loads(value.data), dtype=getattr(torch, value.dtype)).view(shape)


class Resolver:
    """Turns arguments into what an op takes, at given sizes on a given device."""

    def __init__(self, sizes: tuple[int, int], device: torch.device) -> None:
        self._sizes = sizes
        self._device = device

    def call(self, task: Task, tensors: Mapping[str, Any]) -> tuple[Any, ...]:
        """Results of a task, one for each of its outputs."""
        arguments = [self.argument(part, tensors) for part in task.arguments]
        keywords = {name: self.argument(part, tensors) for name, part in task.keywords}
        target = function_of(task.op)
        with torch.no_grad() if task.is_detached else contextlib.nullcontext():
            result = target(*arguments, **keywords)
        if len(task.outputs) == 1 and not isinstance(result, (tuple, list)):
            return (result,)
        return tuple(pytree.tree_leaves(result, is_leaf=lambda x: x is None))[: len(task.outputs)]

    def argument(self, part: Argument, tensors: Mapping[str, Any]) -> Any:
        """One argument."""
        if isinstance(part, Ref):
            return tensors[part.name]
        if isinstance(part, Formula):
            return part(*self._sizes)
        if isinstance(part, tuple):
            return [self.argument(inner, tensors) for inner in part]
        if isinstance(part, Symbol):
            return self._device if part.kind == "device" else getattr(torch, part.name)
        return part


@functools.cache
def function_of(op: str) -> Callable[..., Any]:
    """The function behind an op's name, e.g. `aten.linear.default`.

    Raises:
        ConfigError: E133 where this process has no such op.
    """
    found: Any = torch.ops
    try:
        for part in op.split("."):
            found = getattr(found, part)
    except (AttributeError, RuntimeError) as error:
        raise ConfigError(
            "E133", f"the op {op} is not known to torch {torch.__version__} in this process"
        ) from error
    return found
