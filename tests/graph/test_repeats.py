"""Blocks that repeat."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.graph.formula import BATCH, as_formula
from meshwright.graph.repeats import find_blocks
from meshwright.graph.task_graph import Ref, Task, TaskGraph, Value

OPS = ("norm", "linear", "linear", "attention", "add", "linear")


def chain(num_layers: int, *, changed: int | None = None, paths: bool = True) -> TaskGraph:
    """An embedding, layers of six tasks with a skip, a head; in layer `changed` the skip starts elsewhere."""
    tasks = [Task("embed", "embed", arguments=(Ref("tokens"),), outputs=("embed",))]
    before = "embed"
    for layer in range(num_layers):
        names = [f"{op}_{layer}_{i}" for i, op in enumerate(OPS)]
        skip = names[1] if layer == changed else before
        inputs = [before, names[0], names[0], names[2], skip, names[4]]
        for op, name, source in zip(OPS, names, inputs, strict=True):
            path = f"layers.{layer}.{op}" if paths else ""
            second = (Ref(names[3]),) if op == "add" else ()
            tasks.append(Task(name, op, path, arguments=(Ref(source), *second), outputs=(name,)))
        before = names[-1]
    tasks.append(Task("head", "head", arguments=(Ref(before),), outputs=("head",)))
    made = [task.outputs[0] for task in tasks]
    values = (
        Value("tokens", "input", (BATCH,), "int64"),
        *(Value(n, "activation", (BATCH, as_formula(8)), "float32") for n in made),
    )
    return TaskGraph("chain", "torch.export", 2, 0, ("batch",), values, tuple(tasks), (Ref("head"),))


@pytest.mark.parametrize("paths", [True, False])
def test_layers_are_one_block(paths):
    blocks = find_blocks(chain(96, paths=paths))
    assert [(block.length, block.count) for block in blocks if block.count > 1] == [(6, 96)]
    assert sum(block.length * block.count for block in blocks) == 2 + 6 * 96
    assert [block.path for block in blocks if block.count > 1] == (["layers.0"] if paths else [""])


def test_a_layer_that_is_wired_otherwise_is_another_block():
    blocks = find_blocks(chain(9, changed=4))
    layers = [block for block in blocks if block.path.startswith("layers")]
    assert [(block.start, block.length, block.count) for block in layers] == [
        (1, 6, 4),
        (25, 6, 1),
        (31, 6, 4),
    ]
    assert layers[0].digest == layers[2].digest != layers[1].digest


def test_names_do_not_matter_and_sizes_do():
    graph = chain(3)
    renamed = dataclasses.replace(
        graph, tasks=tuple(dataclasses.replace(t, name=t.name + "x") for t in graph.tasks)
    )
    assert find_blocks(renamed) == find_blocks(graph)
    wider = dataclasses.replace(
        graph, values=tuple(dataclasses.replace(v, shape=(BATCH, as_formula(9))) for v in graph.values)
    )
    assert find_blocks(wider)[1].digest != find_blocks(graph)[1].digest


def test_no_repeat_is_one_block():
    assert [(block.start, block.length, block.count) for block in find_blocks(chain(1))] == [(0, 8, 1)]
