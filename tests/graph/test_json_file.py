"""Graphs as JSON."""

from __future__ import annotations

import json
import math

import pytest

from meshwright.errors import ConfigError
from meshwright.graph.formula import BATCH, SEQUENCE, as_formula
from meshwright.graph.json_file import from_json, to_json
from meshwright.graph.task_graph import Ref, Symbol, Task, TaskGraph, Value

GRAPH = TaskGraph(
    name="tiny",
    source="torch.export",
    batch=3,
    sequence=8,
    free=("batch", "sequence"),
    values=(
        Value("x", "input", (BATCH, SEQUENCE), "float32", path="x", storage="x"),
        Value("y", "activation", (BATCH, SEQUENCE), "bfloat16", storage="y", requires_grad=True),
    ),
    tasks=(
        Task(
            name="y",
            op="aten.masked_fill.Scalar",
            arguments=(Ref("x"), (BATCH * SEQUENCE, -1), -math.inf, None, True, 1.5, Symbol("device", "")),
            keywords=(("dtype", Symbol("dtype", "bfloat16")), ("sides", (Ref("x"), Ref("x")))),
            outputs=("y", ""),
            flops=2 * BATCH,
            saved=("x",),
            saved_bytes=as_formula(12),
            is_random=True,
        ),
    ),
    outputs=(Ref("y"), BATCH),
    notes=("a note",),
    limits=(("sequence", 8, 64),),
)


def test_json_and_back_is_the_same():
    text = to_json(GRAPH)
    again = from_json(text)
    assert again == GRAPH
    assert to_json(again) == text
    assert again.tasks[0].inputs == ("x",)
    assert type(again.tasks[0].arguments[4]) is bool


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: "{", "Expecting property name"),
        (lambda text: json.dumps([1]), '"format"'),
        (lambda text: text.replace("task graph 1", "task graph 9"), '"format"'),
        (lambda text: text.replace('"batch": 3', '"batches": 3'), "'batch' is missing"),
        (lambda text: text.replace('{"dtype"', '{"type"'), "'type' is unknown"),
        (lambda text: text.replace('{"size": "b"}', '{"size": "x"}'), "no formula"),
    ],
)
def test_other_files_are_refused(change, reason):
    with pytest.raises(ConfigError, match=r"E135 m.json .*" + reason):
        from_json(change(to_json(GRAPH)), where="m.json")


def test_a_size_that_is_fixed_is_named():
    with pytest.raises(ConfigError, match=r"E134 .*sequence = 8 and has no formula for sequence = 9"):
        TaskGraph("fixed", "torch.export", 3, 8, ("batch",), (), (), ()).check_sizes(7, 9)
    GRAPH.check_sizes(7, 9)
    with pytest.raises(ConfigError, match=r"E134 tiny at sequence = 7: .* outside of 8 to 64"):
        GRAPH.check_sizes(7, 7)
