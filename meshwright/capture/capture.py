"""`capture`: any module with its loss becomes a task graph.

Owns the order of ways. torch.export first, with batch and sequence open, then with fewer of them open.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from meshwright.capture.costs import with_costs
from meshwright.capture.encode import Encoder
from meshwright.capture.export import Loss, export, sizes_of, without_meta
from meshwright.graph.task_graph import TaskGraph, Value


def capture(model: nn.Module, loss: Loss, batch: Any, *, name: str = "") -> TaskGraph:
    """Read `loss(model, batch)` as a task graph; nothing of the model changes, and nothing is computed.

    Args:
        model: any module, on any device; on meta a model of any size needs no memory.
        loss: of (model, batch), as in training.
        batch: tensors in dicts, lists or tuples.
        name: of the graph; "": the model's class.
    """
    sizes = sizes_of(batch)
    traced, batch = without_meta(model, batch)
    program = export(traced, loss, batch, free=("batch", "sequence"))
    encoder = Encoder(program, sizes)
    encoder.encode()
    graph = TaskGraph(
        name=name or type(model).__name__,
        source="torch.export",
        batch=sizes.batch,
        sequence=sizes.sequence,
        free=encoder.free,
        values=tuple(encoder.values.values()),
        tasks=tuple(encoder.tasks),
        outputs=encoder.outputs,
    )
    return with_constants(with_costs(graph))


def with_constants(graph: TaskGraph) -> TaskGraph:
    """The graph with what depends on no input marked as constant.

    Not constant: what follows from an input, from a random number, or from a value that some task changes in place.
    """
    changed = {graph.value[name].storage for task in graph.tasks for name in task.mutates}
    values: dict[str, Value] = {}
    for value in graph.values:
        fixed = value.kind in ("parameter", "buffer", "constant") and value.storage not in changed
        values[value.name] = dataclasses.replace(value, is_constant=fixed)
    tasks = []
    for task in graph.tasks:
        fixed = not task.is_random and not task.mutates and all(values[n].is_constant for n in task.inputs)
        fixed = fixed and all(graph.value[n].storage not in changed for n in task.outputs if n)
        for output in task.outputs:
            if output:
                values[output] = dataclasses.replace(values[output], is_constant=fixed)
        tasks.append(dataclasses.replace(task, is_constant=fixed))
    return dataclasses.replace(graph, values=tuple(values.values()), tasks=tuple(tasks))
