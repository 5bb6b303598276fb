"""`capture`: any module with its loss becomes a task graph.

Owns the order of ways: torch.export with batch and sequence open, then with fewer of them open, then torch.fx, then
module by module. The graph says which way it was (`source`) and why not a better one (`notes`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from meshwright.capture.attention_masks import masks_as_in_training
from meshwright.capture.costs import with_costs
from meshwright.capture.encode import Encoder, NotPolynomialError
from meshwright.capture.export import (
    Loss,
    Sizes,
    export,
    hand_written_backwards,
    sizes_of,
    tensors_of,
    without_meta,
)
from meshwright.capture.observe import observe_fx, observe_modules
from meshwright.errors import ConfigError
from meshwright.graph.task_graph import TaskGraph, Value

_OPEN = (("batch", "sequence"), ("batch",), ())
_LONGEST_REASON = 300


def capture(model: nn.Module, loss: Loss, batch: Any, *, name: str = "") -> TaskGraph:
    """Read `loss(model, batch)` as a task graph; nothing of the model changes.

    Args:
        model: any module, in training or evaluation mode as wanted; on meta, a model of any size needs no memory.
        loss: of (model, batch), as in training.
        batch: tensors in dicts, lists or tuples; at least 2 samples, or costs hold for 1 only.
        name: of the graph; "": the model's class.

    Raises:
        ConfigError: E130 where the loss does not run, E131 where it needs values and the model is on meta, E137 for a
            batch that is none.
    """
    name = name or type(model).__name__
    try:
        sizes = sizes_of(batch)
    except ValueError as error:
        raise ConfigError("E137", f"{name}: {error}") from error
    graph, reason = _by_export(model, loss, batch, sizes, name)
    if graph is None:
        graph = _by_running(model, loss, batch, sizes, (name, reason))
    return _with_constants(graph)


def _by_export(
    model: nn.Module, loss: Loss, batch: Any, sizes: Sizes, name: str
) -> tuple[TaskGraph | None, str]:
    """The graph, or why there is none."""
    traced, batch = without_meta(model, batch)
    reason, fixed = "", ""
    for free in _OPEN:
        if "sequence" in free and not sizes.sequence:
            continue
        try:
            with masks_as_in_training(batch), hand_written_backwards() as own:
                program = export(traced, loss, batch, free=free)
        # Whatever a model does while it is traced can fail in as many ways; the reason travels with the graph.
        except Exception as error:
            reason = _short(error)
            fixed = fixed or reason
            if _needs_values(error):
                break
            continue
        try:
            graph = _encoded(program, sizes, name, fixed)
            notes = tuple(
                f"W133 the hand-written backward of {kind} is not in the graph; autograd's own stands for it"
                for kind in sorted(own)
            )
            return dataclasses.replace(graph, notes=graph.notes + notes), ""
        # The last three are torch's, of ops that do not run without values or at other sizes.
        except (NotPolynomialError, ConfigError, RuntimeError, NotImplementedError, ValueError) as error:
            reason = _short(error)
            fixed = fixed or reason
    return None, reason


def _encoded(program: ExportedProgram, sizes: Sizes, name: str, reason: str) -> TaskGraph:
    """The graph of a program, with costs; `reason` is why fewer sizes are open than the batch has."""
    encoder = Encoder(program, sizes)
    encoder.encode()
    graph = TaskGraph(
        name=name,
        source="torch.export",
        batch=sizes.batch,
        sequence=sizes.sequence,
        free=encoder.free,
        values=tuple(encoder.values.values()),
        tasks=tuple(encoder.tasks),
        outputs=encoder.outputs,
        notes=_notes(encoder.free, sizes, reason),
        limits=encoder.limits,
    )
    return with_costs(graph)


def _notes(free: tuple[str, ...], sizes: Sizes, reason: str) -> tuple[str, ...]:
    """W131 for each size that has no formula."""
    wanted = ("batch", "sequence") if sizes.sequence else ("batch",)
    why = f": {reason}" if reason else ": the model's code fixes it"
    return tuple(
        f"W131 costs hold for {size} = {getattr(sizes, size)} only{why}"
        for size in wanted
        if size not in free
    )


def _by_running(model: nn.Module, loss: Loss, batch: Any, sizes: Sizes, about: tuple[str, str]) -> TaskGraph:
    if any(x.is_meta for x in (*model.parameters(), *model.buffers(), *tensors_of(batch))):
        raise ConfigError(
            "E131",
            f"{about[0]} cannot be traced without values ({about[1]}), and on meta it has none. Capture a smaller "
            f"copy of it with values, or write the branch without looking at values.",
        )
    try:
        return observe_fx(model, loss, batch, sizes, about)
    except Exception as error:  # as above
        about = (about[0], f"{about[1]}; torch.fx: {_short(error)}")
    try:
        return observe_modules(model, loss, batch, sizes, about)
    except Exception as error:
        raise ConfigError("E130", f"{about[0]} does not run on this batch: {_short(error)}") from error


def _needs_values(error: Exception) -> bool:
    """Whether other sizes cannot help: the trace met a branch or a shape that depends on values."""
    texts = (type(error).__name__, str(error))
    return any(word in text for text in texts for word in ("DataDependent", "data-dependent"))


def _short(error: Exception) -> str:
    kind = "" if isinstance(error, NotPolynomialError | ConfigError) else f"{type(error).__name__}: "
    text = " ".join(str(error).split())
    if isinstance(error, NotPolynomialError):
        text = f"{text} is no polynomial of batch and sequence"
    return f"{kind}{text}"[:_LONGEST_REASON]


def _with_constants(graph: TaskGraph) -> TaskGraph:
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
