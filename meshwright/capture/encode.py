"""From an exported program to tasks and values, without costs.

Owns the meaning of torch.export's nodes: which are operations, which are arithmetic on sizes (gone: sizes are formulas
here), which only check (gone too). Must not know costs (`costs.py`) or how tracing is done (`export.py`).
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Iterator, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from meshwright.capture.export import Sizes
from meshwright.errors import ConfigError
from meshwright.graph.formula import Formula, as_formula
from meshwright.graph.task_graph import Argument, Kind, Ref, Symbol, Task, Value, refs

_KINDS: Mapping[InputKind, Kind] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}
_CHECKS = ("aten._assert", "aten.sym_", "aten._local_scalar_dense", "aten.item")
_PREFIX = "model."
NO_LIMIT = 2**62
_PLACES: Mapping[str, Any] = MappingProxyType({"batch": sympy.Symbol("b"), "sequence": sympy.Symbol("s")})
# Of constants that are made in forward; run again, they are plain copies that autograd does not know.
_PLAIN = {"aten.lift_fresh_copy.default": "aten.clone.default", "aten.detach_.default": "aten.detach.default"}


class NotPolynomialError(Exception):
    """A size is no polynomial of batch and sequence."""


class Encoder:
    """Builds values and tasks from one exported program."""

    def __init__(self, program: ExportedProgram, sizes: Sizes) -> None:
        self._program = program
        self._symbols, self._free = _symbols_of(program, sizes)
        self.values: dict[str, Value] = {}
        self.tasks: list[Task] = []
        self.outputs: tuple[Argument, ...] = ()
        self._names: dict[fx.Node, str] = {}
        self._taken: set[str] = set()
        self._alias: dict[fx.Node, Argument] = {}

    def encode(self) -> None:
        """Fill values, tasks and outputs."""
        self._inputs()
        self.outputs = self._graph(self._program.graph, detached=False)
        self._drop_unused()

    @property
    def free(self) -> tuple[str, ...]:
        """The sizes that are symbols in the program."""
        return tuple(name for name in ("batch", "sequence") if name in self._free)

    @property
    def limits(self) -> tuple[tuple[str, int, int], ...]:
        """(size, least, most) that the program holds for; torch's own least size of 2 is none of the model."""
        found: dict[str, tuple[int, int]] = {}
        for symbol, span in self._program.range_constraints.items():
            if symbol in self._symbols:
                name = str(self._symbols[symbol])
                least, most = found.get(name, (0, NO_LIMIT))
                upper = int(span.upper) if isinstance(span.upper, sympy.Integer) else NO_LIMIT
                found[name] = (max(least, int(span.lower)), min(most, upper))
        names = {str(symbol): name for name, symbol in _PLACES.items()}
        return tuple(
            (names[name], 1 if least <= 2 else least, most)
            for name, (least, most) in sorted(found.items())
            if least > 2 or most < NO_LIMIT
        )

    def _inputs(self) -> None:
        nodes = {node.name: node for node in self._program.graph.nodes if node.op == "placeholder"}
        state = self._program.state_dict
        first: dict[int, str] = {}
        for spec in self._program.graph_signature.input_specs:
            node = nodes.get(getattr(spec.arg, "name", ""))
            if node is None or not isinstance(node.meta.get("val"), Tensor):
                continue
            kind, path = _KINDS[spec.kind], (spec.target or node.name).removeprefix(_PREFIX)
            tensor = state.get(spec.target or "")
            storage = node.name if tensor is None else first.setdefault(id(tensor), node.name)
            self.values[node.name] = Value(
                name=node.name,
                kind=kind,
                shape=self._shape(node.meta["val"]),
                dtype=_name(node.meta["val"].dtype),
                path=path,
                storage=storage,
                requires_grad=kind == "parameter" and bool(tensor is not None and tensor.requires_grad),
                is_constant=kind != "input",
                data=_text_of(self._program.constants.get(spec.target or "")) if kind == "constant" else "",
            )

    def _graph(self, graph: fx.Graph, *, detached: bool) -> tuple[Argument, ...]:
        for node in graph.nodes:
            if node.op == "output":
                return tuple(self._argument(part) for part in _flat(node.args))
            if node.op == "call_function":
                self._call(node, detached=detached)
        raise AssertionError("a graph ends with its output")

    def _call(self, node: fx.Node, *, detached: bool) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            source, index = node.args[0], node.args[1]
            if source in self._alias:
                inner = self._alias[source]
                assert isinstance(inner, tuple)
                assert isinstance(index, int)
                self._alias[node] = inner[index]
            return
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            self._region(node, detached=detached)
            return
        op = str(node.target)
        if not isinstance(node.target, torch._ops.OpOverload) or op.startswith(_CHECKS):
            if isinstance(value, Tensor):
                raise ConfigError("E133", f"the traced model calls {op}, which is no op of torch")
            return
        outputs = self._results(node, value)
        if not any(outputs) and not node.target._schema.is_mutable:
            return
        self.tasks.append(self._task(node, outputs, detached=detached))

    def _results(self, node: fx.Node, value: Any) -> tuple[str, ...]:
        """Names of what a node returns; those of a tuple are the names of the nodes that take it apart."""
        if isinstance(value, Tensor):
            self._add(self._unique(node), value)
            return (self._names[node],)
        if not isinstance(value, (tuple, list)):
            return ()
        names = [""] * len(value)
        for user in node.users:
            if user.target is operator.getitem:
                index = user.args[1]
                assert isinstance(index, int)
                if isinstance(value[index], Tensor):
                    names[index] = names[index] or self._unique(user)
                    self._alias[user] = Ref(names[index])
                    self._add(names[index], value[index])
        return tuple(names)

    def _unique(self, node: fx.Node) -> str:
        """A name for a node: its own, unless a region has another node of this name."""
        name, count = node.name, itertools.count(2)
        while name in self.values or name in self._taken:
            name = f"{node.name}_{next(count)}"
        self._taken.add(name)
        self._names[node] = name
        return name

    def _add(self, name: str, value: Tensor) -> None:
        self.values[name] = Value(
            name=name,
            kind="activation",
            shape=self._shape(value),
            dtype=_name(value.dtype),
            storage=name,
        )

    def _task(self, node: fx.Node, outputs: tuple[str, ...], *, detached: bool) -> Task:
        assert isinstance(node.target, torch._ops.OpOverload)
        schema = node.target._schema
        arguments = tuple(self._argument(part) for part in node.args)
        keywords = tuple((name, self._argument(part)) for name, part in node.kwargs.items())
        mutated: list[str] = []
        by_name = dict(keywords)
        for i, formal in enumerate(schema.arguments):
            written = formal.alias_info is not None and formal.alias_info.is_write
            if written and str(node.target) not in _PLAIN:
                actual = arguments[i] if i < len(arguments) else by_name.get(formal.name)
                mutated += refs(actual)
        if node.target.name() == "aten::batch_norm" and arguments[5] is True:
            mutated += refs(arguments[3:5])  # its schema does not say so
        return Task(
            name=self._names.get(node) or self._unique(node),
            op=_PLAIN.get(str(node.target), str(node.target)),
            path=_path_of(node),
            arguments=arguments,
            keywords=keywords,
            outputs=outputs,
            mutates=tuple(mutated),
            is_random=torch.Tag.nondeterministic_seeded in node.target.tags and _draws(arguments),
            is_detached=detached,
        )

    def _region(self, node: fx.Node, *, detached: bool) -> None:
        """A part under another mode, put in place of its call."""
        name = str(node.target)
        if name == "wrap_with_set_grad_enabled":
            detached, body, actual = not node.args[0], node.args[1], node.args[2:]
        elif name == "wrap_with_autocast" and node.args[2] is False:
            body, actual = node.args[4], node.args[5:]
        else:
            raise ConfigError(
                "E133", f"the traced model holds a region of the kind {name}, which no task stands for"
            )
        assert isinstance(body, fx.Node)
        assert isinstance(body.target, str)
        inner = getattr(self._program.graph_module, body.target).graph
        formals = [part for part in inner.nodes if part.op == "placeholder"]
        for formal, part in zip(formals, actual, strict=True):
            self._alias[formal] = self._argument(part)
        self._alias[node] = self._graph(inner, detached=detached)

    def _argument(self, part: Any) -> Argument:
        if isinstance(part, fx.Node):
            if part in self._alias:
                return self._alias[part]
            value = part.meta.get("val")
            return (
                Ref(self._names.get(part, part.name)) if isinstance(value, Tensor) else self._argument(value)
            )
        if isinstance(part, (tuple, list)):
            return tuple(self._argument(inner) for inner in part)
        if part is None or isinstance(part, (bool, int, float, str)):
            return part
        if isinstance(part, torch.SymInt):
            return self._size(part)
        if isinstance(part, torch.dtype):
            return Symbol("dtype", _name(part))
        if isinstance(part, torch.device):
            return Symbol("device", "")
        if isinstance(part, torch.layout):
            return Symbol("layout", _name(part))
        if isinstance(part, torch.memory_format):
            return Symbol("memory_format", _name(part))
        raise NotPolynomialError(f"{part} ({type(part).__name__})")

    def _shape(self, value: Tensor) -> tuple[Formula, ...]:
        return tuple(self._size(extent) for extent in value.shape)

    def _size(self, extent: Any) -> Formula:
        if isinstance(extent, int):
            return as_formula(extent)
        return _polynomial(extent.node.expr, self._symbols)

    def _drop_unused(self) -> None:
        """Leave out tasks that nobody reads: torch traced checks and masks that are thrown away."""
        needed, kept = set(refs(self.outputs)), []
        for task in reversed(self.tasks):
            if task.mutates or task.is_random or needed & set(task.outputs):
                needed |= {*task.inputs, *task.mutates}
                kept.append(task)
        self.tasks = kept[::-1]
        made = {name for task in self.tasks for name in task.outputs}
        self.values = {
            name: value
            for name, value in self.values.items()
            if name in made or value.kind in ("input", "parameter", "buffer") or name in needed
        }


def _symbols_of(program: ExportedProgram, sizes: Sizes) -> tuple[dict[Any, Any], set[str]]:
    """Symbols of the program as batch or sequence, and which of these two are open."""
    found: dict[Any, Any] = {}
    free: set[str] = set()
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    user = {
        getattr(spec.arg, "name", "")
        for spec in program.graph_signature.input_specs
        if spec.kind == InputKind.USER_INPUT
    }
    leaves = [n.meta["val"] for n in inputs if n.name in user and isinstance(n.meta.get("val"), Tensor)]
    for leaf, dim in zip(leaves, sizes.dims, strict=True):
        for at, name in ((0, "batch"), (dim, "sequence")):
            if at is None or not leaf.dim() or not isinstance(leaf.shape[at], torch.SymInt):
                continue
            extent = leaf.shape[at].node.expr
            if extent.is_Symbol:  # a number where the code fixes the size
                found[extent] = _PLACES[name]
                free.add(name)
    return found, free


def _polynomial(expression: Any, symbols: Mapping[Any, Any]) -> Formula:
    replaced = sympy.expand(expression.subs(symbols))
    try:
        polynomial = sympy.Poly(replaced, *_PLACES.values())
        terms = {(int(i), int(j)): Fraction(int(c.p), int(c.q)) for (i, j), c in polynomial.terms() if c != 0}
    except (sympy.PolynomialError, AttributeError) as error:
        raise NotPolynomialError(str(expression)) from error
    return Formula(tuple(sorted(terms.items())))


def _flat(part: Any) -> Iterator[Any]:
    if isinstance(part, (tuple, list)):
        for inner in part:
            yield from _flat(inner)
    elif isinstance(part, dict):
        yield from _flat(list(part.values()))
    else:
        yield part


def _name(thing: Any) -> str:
    return str(thing).removeprefix("torch.")


def _path_of(node: fx.Node) -> str:
    """The innermost module of the model that a node belongs to."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if path.startswith(_PREFIX)]
    return paths[-1].removeprefix(_PREFIX) if paths else ""


def _draws(arguments: tuple[Argument, ...]) -> bool:
    """False for a dropout that drops nothing: it is called with p = 0 or outside of training."""
    rates = [part for part in arguments[1:] if isinstance(part, (bool, float))]
    return all(rates) if rates else True


def _text_of(constant: Any) -> str:
    if not isinstance(constant, Tensor) or constant.is_meta:
        return ""
    return json.dumps(constant.detach().flatten().tolist())
