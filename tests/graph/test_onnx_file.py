"""ONNX files: shapes, formulas, and what is refused. Files of `data/` were written by torch, without their weights."""

from __future__ import annotations

import builtins
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from meshwright.errors import ConfigError
from meshwright.graph.formula import BATCH, SEQUENCE, as_formula
from meshwright.graph.json_file import from_json, to_json
from meshwright.graph.onnx_file import read_onnx

DATA = Path(__file__).parent / "data"


def write(
    path: Path, nodes: list, inputs: dict, weights: dict | None = None, output: list | None = None
) -> Path:
    """A model of some nodes; inputs and weights by shape."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    held = []
    for name, shape in (weights or {}).items():
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="lost.data")
        held.append(tensor)
    ends = [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, output)]
    graph = helper.make_graph(nodes, "made", values, ends, held)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("mine", 1)]),
        path,
    )
    return path


def test_a_file_of_torch_has_formulas_paths_and_ties():
    graph = read_onnx(DATA / "gpt.onnx")
    assert (graph.source, graph.free) == ("onnx", ("batch", "sequence"))
    assert graph.flops() == BATCH * SEQUENCE * (3 * (24 * 32**2 + 4 * 32 * SEQUENCE) + 2 * 32 * 96)
    assert graph.backward_flops() == 2 * graph.flops()
    assert "blocks.1.attention.query" in {task.path for task in graph.tasks}
    positions = next(task for task in graph.tasks if task.op == "onnx.Range")
    assert positions.is_constant
    assert from_json(to_json(graph)) == graph


# Op, its attributes, shapes of inputs and weights, FLOPs.
COSTS = [
    ("Gemm", {"transA": 1}, {"x": [8, "n"]}, {"w": [8, 5]}, 80 * SEQUENCE),
    (
        "Conv",
        {"group": 2, "pads": [1] * 4},
        {"x": ["n", 4, 9, 9]},
        {"w": [6, 2, 3, 3]},
        2 * 6 * 81 * 18 * BATCH,
    ),
    (
        "ConvTranspose",
        {"strides": [2, 2]},
        {"x": ["n", 4, 5, 5]},
        {"w": [4, 3, 2, 2]},
        2 * 4 * 25 * 12 * BATCH,
    ),
    ("Einsum", {"equation": "bsd,de->bse"}, {"x": ["n", "t", 8]}, {"w": [8, 5]}, 80 * BATCH * SEQUENCE),
    ("LSTM", {"hidden_size": 3}, {"x": [7, 2, 8]}, {"w": [1, 12, 8], "r": [1, 12, 3]}, 2 * 14 * 12 * 11),
    ("Relu", {}, {"x": ["n", 8]}, {}, 0),
]


@pytest.mark.parametrize(("op", "attributes", "inputs", "weights", "flops"), COSTS)
def test_costs_of_ops(tmp_path, op, attributes, inputs, weights, flops):
    node = helper.make_node(op, [*inputs, *weights], ["y"], **attributes)
    graph = read_onnx(write(tmp_path / "m.onnx", [node], inputs, weights))
    assert graph.flops() == as_formula(flops)
    # No gradient of the input is needed.
    assert graph.backward_flops() == graph.flops() * (
        1 if weights and op != "Gemm" else (1 if weights else 0)
    )


@pytest.mark.parametrize("shape", [["n", 2, "t", 4], ["n", "t", 8]])
def test_attention_counts_scores_and_their_product(tmp_path, shape):
    heads = {} if len(shape) == 4 else {"q_num_heads": 2, "kv_num_heads": 2}
    node = helper.make_node("Attention", ["x", "x", "x"], ["y"], **heads)
    assert (
        read_onnx(write(tmp_path / "m.onnx", [node], {"x": shape})).flops()
        == 32 * BATCH * SEQUENCE * SEQUENCE
    )


def test_shapes_are_inferred_and_a_broken_chain_is_an_error(tmp_path):
    nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])]
    graph = read_onnx(write(tmp_path / "m.onnx", nodes, {"x": ["n", 8]}, {"w": [8, 5]}), batch=7)
    assert (graph.batch, graph.flops()) == (7, 80 * BATCH)
    assert [value.shape for value in graph.values if value.name == "h"] == [(BATCH, as_formula(8))]
    nodes[0] = helper.make_node("Compress", ["x", "w"], ["h"])
    with pytest.raises(ConfigError, match=r"E132 .*the shape of h is not known, so MatMul"):
        read_onnx(write(tmp_path / "m.onnx", nodes, {"x": ["n", 8]}, {"w": [8, 5]}))
    graph = read_onnx(write(tmp_path / "m.onnx", nodes[:1], {"x": ["n", 8]}, {"w": [8]}))
    assert graph.notes[-1].startswith("W132 1 tasks have results of unknown shape")


def test_what_has_no_cost_is_refused(tmp_path):
    own = helper.make_node("Fold", ["x"], ["y"], domain="mine", name="third")
    with pytest.raises(ConfigError, match=r"E132 .*nothing is known of the costs of mine::Fold \(third\)"):
        read_onnx(write(tmp_path / "m.onnx", [own], {"x": ["n", 8]}))
    branch = helper.make_graph([helper.make_node("Relu", ["x"], ["z"])], "b", [], [])
    choice = helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch, name="choice")
    with pytest.raises(ConfigError, match=r"E139 .*If \(choice\) is control flow"):
        read_onnx(write(tmp_path / "m.onnx", [choice], {"x": [1]}))


@pytest.mark.parametrize("content", [b"", b"no model", b"\x08\x07garbage"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"E132 .*m.onnx is no ONNX model"):
        read_onnx(path)


def test_a_missing_package_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "onnx":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r'E138 .*pip install "meshwright\[onnx\]"'):
        read_onnx(DATA / "mlp.onnx")
