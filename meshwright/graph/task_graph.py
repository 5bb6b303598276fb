"""A model with its loss as tasks and values: frozen plain data, the same in JSON.

Owns the types and what follows from them: totals, memory that autograd keeps, users of a value. Must not know torch,
devices or how a graph was made (`capture/`, `graph/onnx_file.py`).
Sizes are formulas of batch and sequence (`formula.py`); a size that the model fixes is a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal, TypeAlias

from meshwright.errors import ConfigError
from meshwright.graph.formula import ZERO, Formula, product, total

Kind = Literal["parameter", "buffer", "constant", "input", "activation"]
ELEMENT_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


@dataclass(frozen=True)
class Ref:
    """An argument that is a value of the graph."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """An argument that is a name of torch's: an element type, a device, a layout, a memory format.

    A device is where the model runs; which one it was at capture is not kept.
    """

    kind: Literal["dtype", "device", "layout", "memory_format"]
    name: str


Argument: TypeAlias = "bool | int | float | str | Formula | Ref | Symbol | tuple[Argument, ...] | None"


@dataclass(frozen=True)
class Value:
    """A tensor of the graph.

    Attributes:
        name: unique in the graph.
        kind: where it comes from.
        shape: extents; formulas of batch and sequence.
        dtype: `float32`, `int64` ...
        path: of parameters and buffers, their name in the model; of inputs, the place in the batch.
        storage: name of the value whose memory this is: itself, the base of a view, the first name of a tied weight.
        requires_grad: autograd passes through it.
        is_constant: depends on no input of the batch, on no random number and on nothing that is changed in place.
        data: values of a small constant that the model holds outside its parameters and buffers, as text; "" for none.
    """

    name: str
    kind: Kind
    shape: tuple[Formula, ...]
    dtype: str
    path: str = ""
    storage: str = ""
    requires_grad: bool = False
    is_constant: bool = False
    data: str = ""

    @property
    def numel(self) -> Formula:
        """Elements."""
        return product(self.shape)

    @property
    def bytes(self) -> Formula:
        """Bytes of all elements, each once."""
        return self.numel * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class Task:
    """One operation.

    Attributes:
        name: unique in the graph.
        op: what runs, e.g. `aten.linear.default`.
        path: the module that it belongs to, in the model; "" in the loss or outside all modules.
        arguments: positional ones.
        keywords: the others, by name.
        parameters: names of values that a whole module reads besides its arguments.
        outputs: names of values; "" for one that nobody reads.
        flops: multiply-adds count 2; products, convolutions and attention only, causal attention as the full square.
        backward_flops: of the gradients that are needed.
        causal_flops: of `flops`, the part that belongs to causal attention, half of which a causal kernel needs.
        read_bytes: inputs, parameters included, each element once.
        written_bytes: outputs with memory of their own, or changed in place.
        saved: names of values that autograd keeps until backward; parameters too.
        saved_bytes: what it keeps besides, made inside the task (statistics, masks).
        mutates: names of values that are changed in place.
        is_random: draws random numbers.
        is_constant: all its outputs are, see `Value`.
        is_detached: runs where the model switched autograd off.
    """

    name: str
    op: str
    path: str = ""
    arguments: tuple[Argument, ...] = ()
    keywords: tuple[tuple[str, Argument], ...] = ()
    parameters: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    flops: Formula = ZERO
    backward_flops: Formula = ZERO
    causal_flops: Formula = ZERO
    read_bytes: Formula = ZERO
    written_bytes: Formula = ZERO
    saved: tuple[str, ...] = ()
    saved_bytes: Formula = ZERO
    mutates: tuple[str, ...] = ()
    is_random: bool = False
    is_constant: bool = False
    is_detached: bool = False

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of values that it reads, each once, in order."""
        found = [*refs(self.arguments), *refs(tuple(value for _, value in self.keywords))]
        return tuple(dict.fromkeys([*found, *self.parameters]))


@dataclass(frozen=True)
class TaskGraph:
    """A model with its loss.

    Attributes:
        name: of the model.
        source: how it was read: `torch.export`, `torch.fx`, `modules` or `onnx`.
        batch: samples at capture.
        sequence: positions at capture; 0 where the batch has no such dim.
        free: which of "batch" and "sequence" may have other sizes.
        values: inputs, parameters, buffers and constants first, then results in order of tasks.
        tasks: in the order of execution.
        outputs: what the loss returns; refs, numbers or formulas.
        notes: what this way of reading does not show.
        limits: (size, least, most) between which the model takes the branches that it took at capture.
    """

    name: str
    source: str
    batch: int
    sequence: int
    free: tuple[str, ...]
    values: tuple[Value, ...]
    tasks: tuple[Task, ...]
    outputs: tuple[Argument, ...]
    notes: tuple[str, ...] = ()
    limits: tuple[tuple[str, int, int], ...] = ()

    @cached_property
    def value(self) -> Mapping[str, Value]:
        """Values by name."""
        return {value.name: value for value in self.values}

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Value to the number of the task that made it; not for inputs and parameters."""
        return {name: i for i, task in enumerate(self.tasks) for name in task.outputs if name}

    @cached_property
    def last_user(self) -> Mapping[str, int]:
        """Value to the number of the last task that reads it; the number of tasks for what the loss returns."""
        last = {name: i for i, task in enumerate(self.tasks) for name in task.inputs}
        return {**last, **{name: len(self.tasks) for name in refs(self.outputs)}}

    def check_sizes(self, batch: int, sequence: int) -> None:
        """Raise E134 unless the graph holds at these sizes."""
        for name, wanted, captured in (
            ("batch", batch, self.batch),
            ("sequence", sequence, self.sequence),
        ):
            if wanted != captured and name not in self.free:
                raise ConfigError(
                    "E134",
                    f"{self.name} was captured at {name} = {captured} and has no formula for {name} = {wanted}: "
                    f"its code fixes this size. Capture it at {wanted}.",
                )
        for name, least, most in self.limits:
            wanted = batch if name == "batch" else sequence
            if not least <= wanted <= most:
                raise ConfigError(
                    "E134",
                    f"{self.name} at {name} = {wanted}: its code takes another branch outside of {least} to {most}. "
                    f"Capture it at {wanted}.",
                )

    def flops(self) -> Formula:
        """Of one forward of the whole batch."""
        return total(task.flops for task in self.tasks)

    def backward_flops(self) -> Formula:
        """Of one backward of the whole batch."""
        return total(task.backward_flops for task in self.tasks)

    def causal_flops(self) -> Formula:
        """Of one forward, with half of each causal square left out."""
        return self.flops() - total(task.causal_flops for task in self.tasks) * Fraction(1, 2)

    def num_parameters(self) -> int:
        """Elements of parameters; a tied weight counts once."""
        roots = {v.storage: v for v in reversed(self.values) if v.kind == "parameter"}
        return sum(value.numel(0, 0) for value in roots.values())

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Paths of parameters that are one tensor, each group in the order of the model."""
        groups: dict[str, list[str]] = {}
        for value in self.values:
            if value.kind == "parameter":
                groups.setdefault(value.storage, []).append(value.path)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    def saved_bytes(self, tasks: Iterable[Task] | None = None) -> Formula:
        """Memory that autograd keeps from forward to backward, besides parameters and buffers; each storage once.

        Args:
            tasks: some of the graph's; None: all.
        """
        kept: dict[str, None] = {}
        inner = []
        for task in self.tasks if tasks is None else tasks:
            inner.append(task.saved_bytes)
            for name in task.saved:
                kept[self.value[name].storage] = None
        roots = (self.value[name] for name in kept)
        return total([*inner, *(v.bytes for v in roots if v.kind not in ("parameter", "buffer"))])


def refs(argument: Argument) -> list[str]:
    """Names of values in an argument, in order."""
    if isinstance(argument, Ref):
        return [argument.name]
    if isinstance(argument, tuple):
        return [name for part in argument for name in refs(part)]
    return []
