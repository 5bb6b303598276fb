"""How each operation of a graph connects the axes of its tensors: what goes together, is summed, is needed whole.

Owns one rule for each operation that can run on a part of an axis. An operation without a rule needs all its inputs
whole, so a model with unknown operations is only split less. Sizes of a batch are axes too, which nobody splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from meshwright.graph.formula import Formula
from meshwright.graph.task_graph import Ref, Task
from meshwright.partitioning.axes import Dim
from meshwright.partitioning.axis_propagation import (
    Dims,
    Propagation,
    Rule,
    aligned,
    argument,
    place_of,
    tensor_at,
)

# Elementwise operations; the last dims of their tensors are aligned, and dims of extent 1 stretch.
_POINTWISE = frozenset(
    {"_to_copy", "abs", "add", "add_", "alias", "bernoulli", "bitwise_and", "bitwise_not", "bitwise_or",
     "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clone", "contiguous", "copy", "cos", "detach",
     "div", "div_", "dropout", "dropout_", "elu", "eq", "erf", "erfc", "exp", "expm1", "floor", "fmod",
     "full_like", "ge", "gelu", "gt", "hardsigmoid", "hardswish", "hardtanh", "isinf", "isnan", "le",
     "leaky_relu", "lift_fresh_copy", "log", "log1p", "log2", "log_sigmoid", "logical_and", "logical_not",
     "logical_or", "lt", "masked_fill", "masked_fill_", "maximum", "minimum", "mish", "mul", "mul_",
     "nan_to_num", "ne", "neg", "ones_like", "pow", "reciprocal", "relu", "relu6", "relu_", "remainder",
     "round", "rsqrt", "rsub", "selu", "sigmoid", "sign", "silu", "silu_", "sin", "softplus", "softsign",
     "sqrt", "square", "sub", "sub_", "tan", "tanh", "threshold", "to", "type_as", "where", "zeros_like"}
)  # fmt: skip


def _pointwise(p: Propagation, task: Task) -> list[Dims] | None:
    return [aligned(p, [p.dims[name] for name in task.inputs])]


def _view(p: Propagation, task: Task) -> list[Dims] | None:
    source = tensor_at(p, task, 0)
    assert source is not None
    regrouped = p.axes.regroup(source, p.shape(task.outputs[0]))
    return None if regrouped is None else [regrouped]


def _expand(p: Propagation, task: Task) -> list[Dims] | None:
    source = tensor_at(p, task, 0)
    assert source is not None
    made = p.fresh(task.outputs[0])
    padded = [()] * (len(made) - len(source)) + source
    return [[dim or new for dim, new in zip(padded, made, strict=True)]]


def _permute(p: Propagation, task: Task) -> list[Dims] | None:
    source = tensor_at(p, task, 0)
    assert source is not None
    order = task.arguments[1]
    assert isinstance(order, tuple)
    return [[source[int(i)] for i in order if isinstance(i, int)]]


def _transpose(p: Propagation, task: Task) -> list[Dims] | None:
    source = tensor_at(p, task, 0)
    assert source is not None
    result = list(source)
    i, j = (
        place_of(part, len(result)) for part in (task.arguments[1:3] if len(task.arguments) > 1 else (-2, -1))
    )
    result[i], result[j] = result[j], result[i]
    return [result]


def _t(p: Propagation, task: Task) -> list[Dims] | None:
    source = tensor_at(p, task, 0)
    return None if source is None else [source[::-1]]


def _unsqueeze(p: Propagation, task: Task) -> list[Dims] | None:
    source = tensor_at(p, task, 0)
    assert source is not None
    at = place_of(task.arguments[1], len(source) + 1)
    return [[*source[:at], (), *source[at:]]]


def _squeeze(p: Propagation, task: Task) -> list[Dims] | None:
    source = tensor_at(p, task, 0)
    assert source is not None
    chosen = argument(task, 1, "dim", tuple(range(len(source))))
    places = {place_of(d, len(source)) for d in (chosen if isinstance(chosen, tuple) else (chosen,))}
    return [[dim for i, dim in enumerate(source) if i not in places or dim]]


def _pieces(p: Propagation, task: Task) -> list[Dims] | None:
    """Equal pieces of a dim: its outer axis tells them apart, its inner ones are those of each."""
    source = tensor_at(p, task, 0)
    assert source is not None
    at = place_of(argument(task, 2, "dim", 0), len(source))
    sizes = [p.shape(name)[at] if name else 0 for name in task.outputs]
    extent, size = p.axes.extent(source[at]), max(sizes)
    if extent % size or any(piece not in (0, size) for piece in sizes):
        return None
    parts = p.axes.regroup([source[at]], [extent // size, size])
    if parts is None:
        return None
    p.need([parts[0]], f"{p.what()} tells pieces apart by it")
    return [[*source[:at], parts[1], *source[at + 1 :]] for _ in task.outputs]


def _slice(p: Propagation, task: Task) -> list[Dims] | None:
    source = tensor_at(p, task, 0)
    assert source is not None
    at = place_of(argument(task, 1, "dim", 0), len(source))
    shape = p.shape(task.outputs[0])
    if shape[at] == p.axes.extent(source[at]):
        return [source]
    p.need([source[at]], f"{p.what()} takes a part of it")
    taken = p.axes.make(shape[at])
    p.need([taken], f"{p.what()} takes a part of it")
    return [[*source[:at], taken, *source[at + 1 :]]]


def _select(p: Propagation, task: Task) -> list[Dims] | None:
    source = tensor_at(p, task, 0)
    assert source is not None
    at = place_of(argument(task, 1, "dim", 0), len(source))
    p.need([source[at]], f"{p.what()} takes one of it")
    return [[*source[:at], *source[at + 1 :]] for _ in task.outputs]


def _cat(p: Propagation, task: Task) -> list[Dims] | None:
    parts = [part for part in refs_of(task.arguments[0]) if p.shape(part) != [0]]
    at = place_of(argument(task, 1, "dim", 0), len(p.dims[parts[0]]))
    for name in parts:
        p.need([p.dims[name][at]], f"{p.what()} joins pieces of it")
    rest = aligned(p, [[*p.dims[name][:at], (), *p.dims[name][at + 1 :]] for name in parts])
    joined = p.axes.make(p.shape(task.outputs[0])[at])
    if len(parts) > 1:
        p.need([joined], f"{p.what()} joins pieces of it")
    else:
        joined = p.dims[parts[0]][at]
    return [[*rest[:at], joined, *rest[at + 1 :]]]


def refs_of(argument: Any) -> list[str]:
    """Names of the values in a list of tensors."""
    return [part.name for part in argument if isinstance(part, Ref)] if isinstance(argument, tuple) else []


def _reduce(p: Propagation, task: Task) -> list[Dims] | None:
    """Sums, means and the like over some dims."""
    source = tensor_at(p, task, 0)
    assert source is not None
    chosen = argument(task, 1, "dim", None)
    if chosen is None or isinstance(chosen, (bool, Formula)) or not source:
        return None
    places = {place_of(d, len(source)) for d in (chosen if isinstance(chosen, tuple) else (chosen,))}
    p.need([source[i] for i in places], f"{p.what()} needs it whole")
    kept = bool(argument(task, 2, "keepdim", default=False))
    result = [() if i in places else dim for i, dim in enumerate(source) if kept or i not in places]
    return [result for _ in task.outputs]


def _softmax(p: Propagation, task: Task) -> list[Dims] | None:
    source = tensor_at(p, task, 0)
    assert source is not None
    p.need([source[place_of(argument(task, 1, "dim"), len(source))]], f"{p.what()} needs it whole")
    return [source]


def _norm(p: Propagation, task: Task) -> list[Dims] | None:
    source, shape = tensor_at(p, task, 0), task.arguments[1]
    assert source is not None
    assert isinstance(shape, tuple)
    inner = source[len(source) - len(shape) :]
    p.need(inner, f"{p.what()} needs it whole")
    for name in task.inputs[1:]:
        aligned(p, [inner, p.dims[name]])
    return [source]


def _embedding(p: Propagation, task: Task) -> list[Dims] | None:
    table, places = tensor_at(p, task, 0), tensor_at(p, task, 1)
    assert table is not None
    assert places is not None
    p.lookups.append((table[0], p.number))
    return [[*places, table[1]]]


def _linear(p: Propagation, task: Task) -> list[Dims] | None:
    x, weight = tensor_at(p, task, 0), tensor_at(p, task, 1)
    assert x is not None
    assert weight is not None
    bias = tensor_at(p, task, 2)
    p.sums.append((p.join(x[-1], weight[1]), p.number))
    out = weight[0] if bias is None else p.join(weight[0], bias[0])
    return [[*x[:-1], out]]


def _matmul(p: Propagation, task: Task) -> list[Dims] | None:
    left, right = tensor_at(p, task, 0), tensor_at(p, task, 1)
    if left is None or right is None or len(left) < 2 or len(right) < 2:
        return None
    p.sums.append((p.join(left[-1], right[-2]), p.number))
    return [[*aligned(p, [left[:-2], right[:-2]]), left[-2], right[-1]]]


def _addmm(p: Propagation, task: Task) -> list[Dims] | None:
    added, left, right = (tensor_at(p, task, i) for i in range(3))
    if added is None or left is None or right is None:
        return None
    p.sums.append((p.join(left[-1], right[-2]), p.number))
    return [aligned(p, [[*left[:-1], right[-1]], added])]


def _einsum(p: Propagation, task: Task) -> list[Dims] | None:
    equation, names = task.arguments[0], refs_of(task.arguments[1])
    assert isinstance(equation, str)
    text = equation.replace(" ", "")
    if "." in text or "->" not in text:
        return None
    inputs, output = text.split("->")
    found: dict[str, Dim] = {}
    for letters, name in zip(inputs.split(","), names, strict=True):
        if len(set(letters)) != len(letters):
            return None
        for letter, dim in zip(letters, p.dims[name], strict=True):
            found[letter] = (
                p.join(found[letter], dim) if found.get(letter) and dim else found.get(letter) or dim
            )
    for letter, dim in found.items():
        if letter not in output:
            p.sums.append((dim, p.number))
    return [[found[letter] for letter in output]]


def _attention(p: Propagation, task: Task) -> list[Dims] | None:
    query, key, value = (tensor_at(p, task, i) for i in range(3))
    if query is None or key is None or value is None:
        return None
    if argument(task, 7, "enable_gqa", default=False):
        # A group of query heads shares a key/value head.
        for dims in (key, value):
            heads = p.axes.extent(dims[-3])
            groups = p.axes.regroup([query[-3]], [heads, p.axes.extent(query[-3]) // heads])
            if groups is None:
                return None
            p.join(groups[0], dims[-3])
        leads = aligned(p, [query[:-2], [*key[:-3], ()], [*value[:-3], ()]])
    else:
        leads = aligned(p, [query[:-2], key[:-2], value[:-2]])
    p.need([p.join(query[-1], key[-1])], f"{p.what()} needs it whole")
    p.join(key[-2], value[-2])
    mask = argument(task, 3, "attn_mask")
    if isinstance(mask, Ref):
        aligned(p, [[*leads, query[-2], key[-2]], p.dims[mask.name]])
    return [[*leads, query[-2], value[-1]]]


def _made(p: Propagation, task: Task) -> list[Dims] | None:
    """A constant of a size that the code names: a part of it is made by a smaller number."""
    return [p.fresh(task.outputs[0])]


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(_POINTWISE, _pointwise),
        **dict.fromkeys(
            ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"), _view
        ),
        **dict.fromkeys(("expand", "expand_as"), _expand),
        "permute": _permute,
        **dict.fromkeys(("transpose", "swapaxes", "adjoint", "mT"), _transpose),
        **dict.fromkeys(("t", "numpy_T"), _t),
        "unsqueeze": _unsqueeze,
        "squeeze": _squeeze,
        **dict.fromkeys(("split", "chunk", "split_with_sizes"), _pieces),
        "slice": _slice,
        **dict.fromkeys(("select", "unbind"), _select),
        **dict.fromkeys(("cat", "concat"), _cat),
        **dict.fromkeys(
            ("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "linalg_vector_norm"), _reduce
        ),
        **dict.fromkeys(("softmax", "_softmax", "log_softmax", "cumsum"), _softmax),
        **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
        "embedding": _embedding,
        "linear": _linear,
        **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
        "addmm": _addmm,
        "einsum": _einsum,
        "scaled_dot_product_attention": _attention,
        **dict.fromkeys(("zeros", "ones", "full", "new_zeros", "new_ones"), _made),
    }
)
