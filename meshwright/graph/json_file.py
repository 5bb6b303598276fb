"""A task graph as JSON and back: the same graph, and the same bytes each time.

Owns the format. Formulas are texts or numbers; tuples are lists; a value is `{"value": NAME}`. Attributes that have
their default are left out.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from meshwright.errors import ConfigError
from meshwright.graph.formula import Formula, as_formula, parse_formula
from meshwright.graph.task_graph import Argument, Ref, Symbol, Task, TaskGraph, Value

FORMAT = "meshwright task graph 1"
_FORMULAS = frozenset(
    {"flops", "backward_flops", "causal_flops", "read_bytes", "written_bytes", "saved_bytes"}
)


def to_json(graph: TaskGraph) -> str:
    """One object; a line for each value and each task."""
    head = {
        "format": FORMAT,
        "name": graph.name,
        "source": graph.source,
        "batch": graph.batch,
        "sequence": graph.sequence,
        "free": list(graph.free),
        "outputs": _plain(graph.outputs),
        "notes": list(graph.notes),
        "limits": [list(limit) for limit in graph.limits],
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, rows in (("values", graph.values), ("tasks", graph.tasks)):
        body = ",\n".join(f"  {json.dumps(_row(row))}" for row in rows)
        lines.append(f" {json.dumps(key)}: [\n{body}\n ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str, *, where: str = "") -> TaskGraph:
    """The graph that `to_json` wrote.

    Args:
        text: of the file.
        where: its name, for the error.

    Raises:
        ConfigError: E135 where it is no such text.
    """
    try:
        raw = json.loads(text)
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError(f'it has no "format": "{FORMAT}"')
        return TaskGraph(
            name=raw["name"],
            source=raw["source"],
            batch=raw["batch"],
            sequence=raw["sequence"],
            free=tuple(raw["free"]),
            values=tuple(_value(row) for row in raw["values"]),
            tasks=tuple(_task(row) for row in raw["tasks"]),
            outputs=_arguments(raw["outputs"]),
            notes=tuple(raw["notes"]),
            limits=tuple((name, least, most) for name, least, most in raw["limits"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            "E135",
            f"this is no task graph: {reason}. `meshwright draw --graph MODEL --out FILE.json` writes one.",
            where=where,
        ) from error


def _row(row: Value | Task) -> dict[str, Any]:
    """Attributes that differ from their default."""
    found = {}
    for item in dataclasses.fields(row):
        value = getattr(row, item.name)
        if value != item.default:
            found[item.name] = _plain(value)
    return found


def _plain(argument: Argument) -> Any:
    if isinstance(argument, Formula):
        constant = argument.constant
        return {"size": str(argument)} if constant is None else constant
    if isinstance(argument, Ref):
        return {"value": argument.name}
    if isinstance(argument, Symbol):
        return {argument.kind: argument.name}
    if isinstance(argument, tuple):
        return [_plain(part) for part in argument]
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"float": str(argument)}
    return argument


def _argument(raw: Any) -> Argument:
    if isinstance(raw, list):
        return tuple(_argument(part) for part in raw)
    if not isinstance(raw, dict):
        return raw
    ((kind, text),) = raw.items()
    if kind == "size":
        return parse_formula(text)
    if kind == "value":
        return Ref(text)
    if kind == "float":
        return float(text)
    if kind not in ("dtype", "device", "layout", "memory_format"):
        raise ValueError(f"an argument of the kind {kind!r} is unknown")
    return Symbol(kind, text)


def _arguments(raw: list[Any]) -> tuple[Argument, ...]:
    return tuple(_argument(part) for part in raw)


def _formula(raw: Any) -> Formula:
    return parse_formula(raw["size"]) if isinstance(raw, dict) else as_formula(raw)


def _value(raw: dict[str, Any]) -> Value:
    return Value(**{**raw, "shape": tuple(_formula(extent) for extent in raw["shape"])})


def _task(raw: dict[str, Any]) -> Task:
    fields: dict[str, Any] = {}
    for key, value in raw.items():
        if key in _FORMULAS:
            fields[key] = _formula(value)
        elif key == "keywords":
            fields[key] = tuple((name, _argument(part)) for name, part in value)
        elif key == "arguments":
            fields[key] = _arguments(value)
        else:
            fields[key] = tuple(value) if isinstance(value, list) else value
    return Task(**fields)
