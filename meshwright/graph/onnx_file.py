"""ONNX files as task graphs: a model from any framework, without running it and without its weights.

Owns shapes (by onnx's own inference), which dims are batch and sequence, and FLOPs of products, convolutions and
recurrences. Must not know torch.
Convention: initialisers of floats are learned parameters; a dim that the file calls by a name is open. Backward of a
product costs its forward once for each operand that needs a gradient.
Limits: an ONNX file has no loss, and no word about what autograd keeps, so `saved` is empty; such a
graph cannot be executed.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.errors import ConfigError
from meshwright.graph.formula import BATCH, SEQUENCE, ZERO, Formula, as_formula, product, total
from meshwright.graph.task_graph import Argument, Ref, Task, TaskGraph, Value

_DTYPES: Mapping[int, str] = MappingProxyType(
    {
        1: "float32",
        2: "uint8",
        3: "int8",
        5: "int16",
        6: "int32",
        7: "int64",
        9: "bool",
        10: "float16",
        11: "float64",
        14: "complex64",
        15: "complex128",
        16: "bfloat16",
        17: "float8_e4m3fn",
        19: "float8_e5m2",
    }
)
_CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
_SHAPE_ONLY = frozenset({"Shape", "Size", "Constant", "ConstantOfShape"})
_RANDOM = frozenset({"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli"})
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
# Products that have no formula here, and so would count zero.
_UNCOUNTED = frozenset(
    {"DeformConv", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "LinearAttention"}
)
_OWN_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview.training"})
_SCOPES = "pkg.torch.onnx.name_scopes"


def read_onnx(path: Path, *, batch: int = 2, sequence: int = 16) -> TaskGraph:
    """The graph of an ONNX file; weights are not read, and may be missing.

    Args:
        path: of the file.
        batch: samples, where the file leaves them open.
        sequence: positions, where the file leaves them open.

    Raises:
        ConfigError: E138 without onnx, E132 for a file that is none, an op that nobody knows or a shape that nobody
            can tell, E139 for control flow.
    """
    try:
        import onnx
        from onnx import inliner, shape_inference
    except ImportError as error:
        raise ConfigError(
            "E138", 'reading .onnx files needs onnx, which is not installed: pip install "meshwright[onnx]"'
        ) from error
    try:
        model = onnx.load(str(path), load_external_data=False)
        if not model.graph.node:
            raise ValueError("it holds no nodes")
        if model.functions:
            model = inliner.inline_local_functions(model)
        model = shape_inference.infer_shapes(model, data_prop=True)
    # A broken file ends in protobuf's errors, a broken graph in onnx's; both have many types.
    except Exception as error:
        raise ConfigError("E132", f"{path} is no ONNX model: {' '.join(str(error).split())[:200]}") from error
    return _Reader(model.graph, path, (batch, sequence)).read()


class _Reader:
    """Builds a graph from one ONNX graph."""

    def __init__(self, graph: Any, path: Path, sizes: tuple[int, int]) -> None:
        self._graph = graph
        self._path = path
        self._weights = {item.name for item in graph.initializer}
        self._inputs = [item for item in graph.input if item.name not in self._weights]
        self._dims = self._named_dims()
        self._sizes = sizes
        self._types: dict[str, tuple[tuple[Formula, ...], str]] = {}
        self._values: dict[str, Value] = {}
        self._unknown = 0

    def read(self) -> TaskGraph:
        """All of it."""
        self._check_ops()
        for item in (*self._graph.value_info, *self._graph.input, *self._graph.output):
            found = self._type_of(item.type.tensor_type)
            if found is not None:
                self._types[item.name] = found
        for item in self._graph.initializer:
            shape = tuple(as_formula(extent) for extent in item.dims)
            self._types[item.name] = (shape, _DTYPES.get(item.data_type, "float32"))
        for item in self._inputs:
            self._add(item.name, "input")
        made = {name for node in self._graph.node for name in node.output}
        for node in self._graph.node:
            for name in node.input:
                if name and name not in made and name not in self._values:
                    self._add(name, "parameter")
        tasks = tuple(self._task(i, node) for i, node in enumerate(self._graph.node))
        free = tuple(
            sorted({name for value in self._values.values() for e in value.shape for name in e.uses})
        )
        notes: tuple[str, ...] = ("an ONNX file has no loss, and does not say what autograd keeps",)
        if self._unknown:
            notes += (
                f"W132 {self._unknown} tasks have results of unknown shape; their bytes are not counted",
            )
        batch, sequence = self._captured(free)
        return TaskGraph(
            name=self._path.stem,
            source="onnx",
            batch=batch,
            sequence=sequence,
            free=free,
            values=tuple(self._values.values()),
            tasks=tasks,
            outputs=tuple(Ref(item.name) for item in self._graph.output),
            notes=notes,
        )

    def _check_ops(self) -> None:
        """Refuse what costs cannot be told of."""
        for node in self._graph.node:
            if node.op_type in _CONTROL_FLOW:
                raise ConfigError(
                    "E139",
                    f"{self._path}: {node.op_type} ({node.name}) is control flow that depends on data, so its costs do "
                    f"too. Export the model for one branch.",
                )
            if node.domain not in _OWN_DOMAINS or node.op_type in _UNCOUNTED:
                raise ConfigError(
                    "E132",
                    f"{self._path}: nothing is known of the costs of {node.domain or 'ai.onnx'}::{node.op_type} "
                    f"({node.name}). Export the model with ops of ONNX itself.",
                )

    def _named_dims(self) -> dict[str, Formula]:
        """Open dims of inputs: dim 0 is the batch, the next open one the sequence."""
        found: dict[str, Formula] = {}
        for item in self._inputs:
            for i, dim in enumerate(item.type.tensor_type.shape.dim):
                if dim.dim_param:
                    found.setdefault(dim.dim_param, BATCH if i == 0 else SEQUENCE)
        return found

    def _captured(self, free: tuple[str, ...]) -> tuple[int, int]:
        """Sizes at export; those that the file leaves open are the caller's."""
        shapes = [self._values[item.name].shape for item in self._inputs]
        first = next((shape for shape in shapes if shape), ())
        batch = first[0].constant if first else 1
        tokens = [
            s
            for item, s in zip(self._inputs, shapes, strict=True)
            if self._values[item.name].dtype == "int64"
        ]
        length = next((shape[1].constant for shape in tokens if len(shape) == 2), 0)
        return (
            self._sizes[0] if "batch" in free or batch is None else batch,
            self._sizes[1] if "sequence" in free or length is None else length,
        )

    def _type_of(self, tensor: Any) -> tuple[tuple[Formula, ...], str] | None:
        """Shape and element type, or None where one extent is not known."""
        if not tensor.HasField("shape"):
            return None
        extents = []
        for dim in tensor.shape.dim:
            extent = as_formula(dim.dim_value) if dim.HasField("dim_value") else self._dim(dim.dim_param)
            if extent is None:
                return None
            extents.append(extent)
        return tuple(extents), _DTYPES.get(tensor.elem_type, "float32")

    def _dim(self, text: str) -> Formula | None:
        """A named extent such as `batch` or `batch*sequence + 1`; None for any other text."""
        if not text:
            return None
        try:
            return _evaluate(ast.parse(text, mode="eval").body, self._dims)
        except (SyntaxError, KeyError, ValueError):
            return None

    def _add(
        self, name: str, kind: Any, *, constant: bool = False, storage: str = "", grad: bool = False
    ) -> None:
        shape, dtype = self._types.get(name, ((), ""))
        learned = kind == "parameter" and dtype.startswith(("float", "bfloat"))
        if kind == "parameter" and not learned:
            kind = "constant"
        if name not in self._types:
            dtype, shape = "float32", (ZERO,)
        self._values[name] = Value(
            name=name,
            kind=kind,
            shape=shape,
            dtype=dtype,
            path=name if kind != "activation" else "",
            storage=storage or name,
            requires_grad=learned or (grad and dtype.startswith(("float", "bfloat"))),
            is_constant=constant or kind in ("parameter", "constant"),
        )

    def _task(self, number: int, node: Any) -> Task:
        names = [name for name in node.input if name]
        inputs = [self._values[name] for name in names]
        is_random = node.op_type in _RANDOM or (node.op_type == "Dropout" and len(names) > 2)
        constant = not is_random and (
            node.op_type in _SHAPE_ONLY or all(value.is_constant for value in inputs)
        )
        grad = node.op_type not in _SHAPE_ONLY and any(value.requires_grad for value in inputs)
        is_view = node.op_type in _VIEWS and bool(inputs)
        for name in node.output:
            if name:
                self._unknown += name not in self._types
                storage = self._values[names[0]].storage if is_view else ""
                self._add(name, "activation", constant=constant, storage=storage, grad=grad)
        flops = self._flops(node)
        outputs = [self._values[name] for name in node.output if name]
        operands = sum(value.requires_grad for value in inputs[:2])
        return Task(
            name=node.name or f"{node.op_type}_{number}",
            op=f"onnx.{node.op_type}",
            path=_path_of(node),
            arguments=tuple(Ref(name) if name else None for name in node.input),
            keywords=tuple((item.name, _attribute(item)) for item in node.attribute),
            outputs=tuple(node.output),
            flops=flops,
            backward_flops=flops * operands,
            read_bytes=ZERO if is_view else total(value.bytes for value in inputs),
            written_bytes=ZERO if is_view else total(value.bytes for value in outputs),
            is_random=is_random,
            is_constant=constant,
        )

    def _flops(self, node: Any) -> Formula:
        count = _FLOPS.get(node.op_type)
        if count is None:
            return ZERO
        missing = [name for name in (*node.input[:2], *node.output[:1]) if name and name not in self._types]
        if missing:
            raise ConfigError(
                "E132",
                f"{self._path}: the shape of {missing[0]} is not known, so {node.op_type} ({node.name}) has no cost. "
                f"Export the model with sizes, or with names for batch (dim 0) and sequence only.",
            )
        shapes = [self._types[name][0] if name else () for name in node.input]
        attributes = {item.name: _attribute(item) for item in node.attribute}
        return count(shapes, self._types[node.output[0]][0] if node.output[0] else (), attributes)


Shapes = list[tuple[Formula, ...]]


def _matmul(inputs: Shapes, output: tuple[Formula, ...], _attributes: Mapping[str, Argument]) -> Formula:
    return product([2, *output, inputs[0][-1]])


def _gemm(inputs: Shapes, output: tuple[Formula, ...], attributes: Mapping[str, Argument]) -> Formula:
    return product([2, *output, inputs[0][0 if attributes.get("transA") else -1]])


def _convolution(inputs: Shapes, output: tuple[Formula, ...], _attributes: Mapping[str, Argument]) -> Formula:
    return product([2, *output, *inputs[1][1:]])


def _transposed(inputs: Shapes, _output: tuple[Formula, ...], _attributes: Mapping[str, Argument]) -> Formula:
    return product([2, *inputs[0], *inputs[1][1:]])


def _einsum(inputs: Shapes, _output: tuple[Formula, ...], attributes: Mapping[str, Argument]) -> Formula:
    """Every letter once: what one contraction of all operands costs."""
    extents: dict[str, Formula] = {}
    for letters, shape in zip(str(attributes["equation"]).split("->")[0].split(","), inputs, strict=True):
        extents.update(zip(letters.strip(), shape, strict=True))
    return product([2, *extents.values()]) if len(inputs) > 1 else ZERO


def _recurrence(inputs: Shapes, _output: tuple[Formula, ...], _attributes: Mapping[str, Argument]) -> Formula:
    """(S, B, I) with weights (D, G*H, I) and (D, G*H, H)."""
    return product([2, *inputs[0][:2]]) * (product(inputs[1]) + product(inputs[2]))


def _attention(inputs: Shapes, _output: tuple[Formula, ...], attributes: Mapping[str, Argument]) -> Formula:
    """Q (B, N, S, H) or (B, S, N*H), K and V alike: scores, and their product with V."""
    query, key, value = inputs[:3]
    if len(query) == 4:
        return product([2, *query[:3], key[2]]) * (query[3] + value[3])
    heads, kv_heads = attributes["q_num_heads"], attributes["kv_num_heads"]
    assert isinstance(heads, int)
    assert isinstance(kv_heads, int)
    width = value[2] * (heads // math.gcd(heads, kv_heads)) if heads != kv_heads else value[2]
    return product([2, *query[:2], key[1]]) * (query[2] + width)


_FLOPS: Mapping[str, Callable[[Shapes, tuple[Formula, ...], Mapping[str, Argument]], Formula]] = (
    MappingProxyType(
        {
            "MatMul": _matmul,
            "Gemm": _gemm,
            "Conv": _convolution,
            "ConvTranspose": _transposed,
            "Einsum": _einsum,
            "LSTM": _recurrence,
            "GRU": _recurrence,
            "RNN": _recurrence,
            "Attention": _attention,
        }
    )
)


def _evaluate(node: ast.expr, names: Mapping[str, Formula]) -> Formula:
    """Sums, differences and products of named extents."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return as_formula(node.value)
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _evaluate(node.operand, names) * -1
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, names), _evaluate(node.right, names)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
    raise ValueError("no polynomial")


def _attribute(item: Any) -> Argument:
    """Numbers and texts; tensors and graphs are left out."""
    kinds = {
        1: item.f,
        2: item.i,
        3: item.s.decode(errors="replace"),
        6: tuple(item.floats),
        7: tuple(item.ints),
    }
    return kinds.get(item.type)


def _path_of(node: Any) -> str:
    """The module, in files that torch wrote: the innermost scope but for the op itself."""
    for item in node.metadata_props:
        if item.key == _SCOPES:
            try:
                scopes = ast.literal_eval(item.value)
            except (SyntaxError, ValueError):
                return ""
            return str(scopes[-2]) if len(scopes) > 1 else ""
    return ""
