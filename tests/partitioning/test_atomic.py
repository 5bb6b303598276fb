"""Phase 1: constants are cloned into the parts that need them, and never sent."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.errors import PlanError
from meshwright.graph.formula import BATCH, as_formula
from meshwright.graph.task_graph import Ref, Task, TaskGraph, Value
from meshwright.partitioning.atomic import atomic_parts
from meshwright.partitioning.graph_costs import GraphCosts, Roofline
from meshwright.partitioning.levels import single_parts

EIGHT = as_formula(8)


def graph_of(tasks, inputs=("x",), params=(), constant=()) -> TaskGraph:
    """Tasks as (op, inputs, output)."""
    made = [
        Task(out, op, arguments=tuple(map(Ref, reads)), outputs=(out,), is_constant=out in constant)
        for op, reads, out in tasks
    ]
    values = (
        *(Value(name, "input", (BATCH, EIGHT), "float32", storage=name) for name in inputs),
        *(
            Value(name, "parameter", (EIGHT, EIGHT), "float32", name, name, is_constant=True)
            for name in params
        ),
        *(Value(t.outputs[0], "activation", (BATCH, EIGHT), "float32", storage=t.outputs[0]) for t in made),
    )
    return TaskGraph("g", "torch.export", 2, 0, ("batch",), values, tuple(made), (Ref(made[-1].outputs[0]),))


def test_a_shared_transpose_is_computed_in_both_parts():
    graph = graph_of(
        [("t", ["W"], "wt"), ("mm", ["x", "wt"], "y"), ("mm", ["y", "wt"], "z")],
        params=["W"],
        constant=["wt"],
    )
    found = atomic_parts(graph)
    assert [(part.task, part.constants) for part in found.parts] == [(1, (0,)), (2, (0,))]
    assert [(s.value, s.producer, s.consumers) for s in found.sent] == [("y", 0, (1,))]
    assert found.shared == (("W", (0, 1)),)


def test_a_mask_of_three_layers_is_cloned_three_times():
    graph = graph_of(
        [
            ("arange", [], "n"),
            ("lt", ["n"], "mask"),
            ("layer", ["x", "mask"], "a"),
            ("layer", ["a", "mask"], "b"),
            ("layer", ["b", "mask"], "c"),
        ],
        constant=["n", "mask"],
    )
    found = atomic_parts(graph)
    assert found.num_clones == 6
    assert all(part.constants == (0, 1) for part in found.parts)
    assert {sent.value for sent in found.sent} == {"a", "b"}


def test_fork_and_join():
    graph = graph_of(
        [
            ("fc1", ["x"], "a"),
            ("fc2", ["a"], "b"),
            ("fc3", ["a"], "c"),
            ("mul", ["c"], "d"),
            ("add", ["b", "d"], "e"),
            ("fc4", ["e"], "f"),
        ]
    )
    found = atomic_parts(graph)
    assert len(found.parts) == 6
    costs = GraphCosts(graph, Roofline(1.0, 1.0))
    level = single_parts(6, costs.carried(2))
    assert level.has_detour(0, 1) is False  # fc1 and fc2 alone are convex
    merged = dataclasses.replace(level, blocks=((0, 1), (2,), (3,), (4,), (5,)))
    assert merged.has_detour(0, 3)  # {fc1, fc2} + add: fc3 and mul lie between
    assert costs.chain(level, 2).live_bytes == (0, 64, 128, 128, 128, 64, 0)


def test_tied_weights_and_inputs_that_are_read_again():
    graph = graph_of(
        [("embed", ["x", "W"], "a"), ("layer", ["a", "x"], "b"), ("head", ["b", "W"], "c")], params=["W"]
    )
    costs = GraphCosts(graph, Roofline(1.0, 1.0))
    level = single_parts(3, costs.carried(2))
    chain = costs.chain(level, 2)
    assert [(tie.users, tie.bytes) for tie in chain.ties] == [((0, 2), 256)]
    assert [(v.producer, v.consumers) for v in chain.carried] == [(0, (1,)), (1, (2,))]


def test_views_of_one_storage_cross_together():
    graph = graph_of([("qkv", ["x"], "a"), ("view", ["a"], "v"), ("use", ["v"], "c"), ("use", ["a"], "d")])
    values = tuple(dataclasses.replace(v, storage="a") if v.name == "v" else v for v in graph.values)
    costs = GraphCosts(dataclasses.replace(graph, values=values), Roofline(1.0, 1.0))
    assert [(v.producer, v.consumers, v.bytes) for v in costs.carried(2)] == [(0, (1, 2, 3), 64)]


def test_graphs_that_cannot_be_cut():
    graph = graph_of([("ones", [], "a")], constant=["a"])
    with pytest.raises(PlanError, match="E274 g has no task that depends on its batch"):
        atomic_parts(graph)
    with pytest.raises(PlanError, match="E273 g could be read module by module only"):
        GraphCosts(dataclasses.replace(graph, source="modules"), Roofline(1.0, 1.0))
