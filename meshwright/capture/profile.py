"""Seconds of a graph's blocks, measured on this machine: each structurally different block once, forward and backward.

Owns the measurement and its cache, a JSON file a fingerprint of graph, machine, torch, threads and positions. A block
runs alone on random tensors of the shapes that reach it, so the model's weights are not needed.
Simplifications: times are of the CPU; integers that reach a block are zeros; stretches that do not repeat are measured
module by module; at other samples than those measured, seconds lie on a line through the nearest two.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.capture.run import Resolver, constant_of
from meshwright.errors import PlanError
from meshwright.graph.repeats import digest_of, find_blocks
from meshwright.graph.task_graph import Task, TaskGraph, Value
from meshwright.partitioning.graph_costs import TaskSeconds
from meshwright.partitioning.unit_costs import on_line

_SAMPLES, _REPEATS = (2, 4, 8), 5


@dataclass(frozen=True)
class _Stretch:
    """Neighbouring tasks, and the digest that equal ones share."""

    first: int
    stop: int
    digest: str


def measured_seconds(
    graph: TaskGraph, cache_dir: Path, *, sequence: int = 0
) -> Callable[[int], Sequence[TaskSeconds]]:
    """What `GraphCosts(measured=...)` takes; measures at once, or reads what was measured before.

    Args:
        graph: captured with torch.export.
        cache_dir: the file of seconds lies here.
        sequence: positions; 0: as captured.

    Raises:
        PlanError: E275 where a block cannot be run.
    """
    if graph.source != "torch.export":
        raise PlanError("E275", f"{graph.name} was read by {graph.source}: it cannot be run to be measured")
    stretches = _stretches(graph)
    positions = sequence or graph.sequence
    samples = _SAMPLES if "batch" in graph.free else (graph.batch,)
    path = cache_dir / "block-seconds" / f"{_fingerprint(stretches, positions)}.json"
    if path.is_file():
        seconds = json.loads(path.read_text(encoding="utf-8"))
    else:
        examples = {stretch.digest: stretch for stretch in stretches}
        seconds = {
            digest: [_measure(graph, stretch, (count, positions)) for count in samples]
            for digest, stretch in examples.items()
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(seconds), encoding="utf-8")
        unfinished.replace(path)

    def at(count: int) -> list[TaskSeconds]:
        found = []
        for stretch in stretches:
            forward, backward = zip(*seconds[stretch.digest], strict=True)
            lines = (on_line(samples, knots, count) for knots in (forward, backward))
            found.append(TaskSeconds(stretch.first, stretch.stop, *lines))
        return found

    return at


def _stretches(graph: TaskGraph) -> tuple[_Stretch, ...]:
    """Repeats of blocks one by one; what does not repeat, cut where the module changes."""
    found = []
    for block in find_blocks(graph):
        if block.count > 1:
            starts = list(range(block.start, block.stop + 1, block.length))
            found += [_Stretch(a, b, block.digest) for a, b in itertools.pairwise(starts)]
            continue
        paths = [task.path for task in graph.tasks[block.start : block.stop]]
        starts = [block.start + i for i in range(len(paths)) if not i or paths[i] != paths[i - 1]]
        for a, b in itertools.pairwise([*starts, block.stop]):
            found.append(_Stretch(a, b, digest_of(graph, a, b - a)))
    return tuple(found)


def _fingerprint(stretches: Sequence[_Stretch], positions: int) -> str:
    """Of graph (element types are in the digests), machine, torch, threads and positions."""
    machine = (platform.node(), platform.machine(), os.cpu_count(), torch.__version__)
    rows = (*machine, torch.get_num_threads(), positions, [stretch.digest for stretch in stretches])
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def _measure(graph: TaskGraph, stretch: _Stretch, sizes: tuple[int, int]) -> tuple[float, float]:
    """Median seconds of forward and of backward."""
    tasks = graph.tasks[stretch.first : stretch.stop]
    made = {name for task in tasks for name in task.outputs}
    outside = dict.fromkeys(name for task in tasks for name in task.inputs if name not in made)
    try:
        tensors = {name: _tensor(graph, graph.value[name], sizes) for name in outside}
        times = [_once(graph, tasks, tensors, sizes) for _ in range(1 + _REPEATS)][1:]
    # a kernel may refuse the values as in as many ways as there are kernels
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        names = f"{tasks[0].path or tasks[0].op} .. {tasks[-1].path or tasks[-1].op}"
        raise PlanError(
            "E275",
            f"{graph.name}: {names} cannot be run alone to be measured: {' '.join(str(error).split())[:200]}",
        ) from error
    forward, backward = zip(*times, strict=True)
    return statistics.median(forward), statistics.median(backward)


def _once(
    graph: TaskGraph, tasks: Sequence[Task], tensors: dict[str, Any], sizes: tuple[int, int]
) -> tuple[float, float]:
    changed = {name for task in tasks for name in task.mutates}
    given = {
        name: x.clone() if name in changed and isinstance(x, Tensor) else x for name, x in tensors.items()
    }
    resolve, inside = Resolver(sizes, torch.device("cpu")), set(tensors)
    with torch.enable_grad():
        started = time.perf_counter()
        for task in tasks:
            for name, result in zip(task.outputs, resolve.call(task, given), strict=True):
                given[name] = result
        forward = time.perf_counter() - started
    read = {name for task in tasks for name in task.inputs}
    ends = [
        x
        for name, x in given.items()
        if name not in inside | read and isinstance(x, Tensor) and x.requires_grad
    ]
    last = given.get(tasks[-1].outputs[0])
    if isinstance(last, Tensor) and last.requires_grad and not ends:
        ends = [last]
    if not ends:
        return forward, 0.0
    gradients = [torch.ones_like(x) for x in ends]
    leaves = [x for x in tensors.values() if isinstance(x, Tensor) and x.requires_grad]
    started = time.perf_counter()
    torch.autograd.grad(ends, leaves, gradients, allow_unused=True)
    return forward, time.perf_counter() - started


def _tensor(graph: TaskGraph, value: Value, sizes: tuple[int, int]) -> Tensor:
    """A tensor as it reaches a block."""
    if value.kind == "constant" and value.data:
        return constant_of(graph, value)
    shape = [extent(*sizes) for extent in value.shape]
    dtype = getattr(torch, value.dtype)
    if not dtype.is_floating_point:
        # masks let everything through
        return torch.full(shape, dtype == torch.bool, dtype=dtype)
    # buffers may be variances: none is below zero
    made = torch.rand(shape, dtype=torch.float32).to(dtype)
    return made.requires_grad_(value.requires_grad)
