"""How a model came to its stages, as pictures: its tasks and values in atomic parts, and the blocks of each step.

Owns the two panes that stand beside the stages (`draw.py`). Constants are dashed: weights, and tasks that are copied
into every part that needs them. A large graph shows repeated blocks once, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import accumulate

from meshwright.graph.draw import short
from meshwright.graph.repeats import find_blocks
from meshwright.partitioning.atomic import Part
from meshwright.partitioning.draw import Pane
from meshwright.partitioning.graph_costs import GraphCosts
from meshwright.partitioning.levels import Level
from meshwright.partitioning.model_plan import ModelPlan

# Up to so many parts a graph is shown whole.
_MOST_WHOLE, _MOST_ROWS = 60, 300
# Pixels.
_TOP, _ROW, _BOX, _LEFT, _GRAPH_WIDTH = 84, 34, 230, 210, 620
_COLUMN, _STEPS_HEIGHT = 96, 620
_DASHED = 'fill="none" stroke="#64748b" stroke-dasharray="3 2"'
_COLOURS = ("#bfdbfe", "#bbf7d0", "#fde68a", "#fecaca", "#ddd6fe", "#a5f3fc")


@dataclass(frozen=True)
class _Rows:
    """Which parts are drawn.

    Attributes:
        parts: numbers, one a row.
        row_of: the row that stands for each part.
        repeats: (first row, last row, times).
    """

    parts: tuple[int, ...]
    row_of: dict[int, int]
    repeats: tuple[tuple[int, int, int], ...]


def graph_pane(costs: GraphCosts) -> Pane:
    """Tasks as boxes and the values between them as dots, numbered by atomic part."""
    rows, atomic = _rows(costs), costs.atomic
    shown = rows.parts[:_MOST_ROWS]
    collapsed = "; repeated blocks are drawn once" if rows.repeats else ""
    cut = f"; the first {_MOST_ROWS} rows" if len(shown) < len(rows.parts) else ""
    shapes = [
        f'<text x="8" y="22" font-size="14">{escape(costs.graph.name)}: {len(atomic.parts)} atomic parts, '
        f"{atomic.num_clones} copies of constant tasks</text>",
        f'<text x="8" y="{_TOP - 14}">dashed: constants, copied into each part{collapsed}{cut}</text>',
    ]
    for row, part in enumerate(shown):
        shapes += _part(costs, part, _TOP + _ROW * row)
    edges = {
        (rows.row_of[sent.producer], rows.row_of[reader], sent.value)
        for sent in atomic.sent
        for reader in sent.consumers
    }
    shapes += [_edge(costs, edge) for edge in sorted(edges) if edge[0] < edge[1] < len(shown)]
    for first, last, times in rows.repeats:
        if last < len(shown):
            top, bottom = _TOP + _ROW * first, _TOP + _ROW * last + 22
            shapes.append(
                f'<path d="M6 {top} H2 V{bottom} H6" fill="none" stroke="#0f172a"/>'
                f'<text x="8" y="{top - 2}" font-size="10">{times} times, parts of the first</text>'
            )
    return Pane(_GRAPH_WIDTH, _TOP + _ROW * len(shown) + 24, tuple(shapes))


def steps_pane(costs: GraphCosts, plan: ModelPlan) -> Pane:
    """A column a step: its blocks as long as their seconds, in order; the last one coloured by stage."""
    parts = costs.parts(costs.graph.batch)
    seconds = [f + b for f, b in zip(parts.forward, parts.backward, strict=True)]
    columns = [("atomic", costs.parts_level), *zip(plan.steps, plan.levels, strict=True)]
    shapes = [
        '<text x="8" y="22" font-size="14">blocks after each step</text>',
        f'<text x="8" y="{_TOP - 34}">as long as their forward and backward</text>',
    ]
    for number, (name, level) in enumerate(columns):
        left = 8 + _COLUMN * number
        ends = _ends(level, seconds)
        shapes += [
            f'<text x="{left}" y="{_TOP - 14}" font-size="11">{name}: {len(level.blocks)}</text>',
            f'<rect x="{left}" y="{_TOP}" width="{_COLUMN - 14}" height="{_STEPS_HEIGHT}" fill="#e2e8f0"/>',
        ]
        for index, stage in enumerate(plan.partition.stages if number == len(columns) - 1 else ()):
            top, bottom = ends[stage.first], ends[stage.last + 1]
            colour = _COLOURS[index % len(_COLOURS)]
            shapes.append(
                f'<rect x="{left}" y="{top:.1f}" width="{_COLUMN - 14}" height="{bottom - top:.1f}" '
                f'fill="{colour}"><title>stage {index}</title></rect>'
            )
        borders = " ".join(f"M{left} {end:.1f}h{_COLUMN - 14}" for end in ends)
        shapes.append(f'<path d="{borders}" stroke="#475569" stroke-width="0.6"/>')
    return Pane(16 + _COLUMN * len(columns), _TOP + _STEPS_HEIGHT + 24, tuple(shapes))


def _ends(level: Level, seconds: list[float]) -> list[float]:
    """Where blocks begin and end, from top to bottom."""
    lengths = [sum(seconds[part] for part in members) for members in level.blocks]
    scale = _STEPS_HEIGHT / (sum(lengths) or 1.0)
    return [_TOP + end * scale for end in accumulate(lengths, initial=0.0)]


def _rows(costs: GraphCosts) -> _Rows:
    parts = costs.atomic.parts
    number_of = {part.task: number for number, part in enumerate(parts)}
    if len(parts) <= _MOST_WHOLE:
        everything = tuple(range(len(parts)))
        return _Rows(everything, {part: part for part in everything}, ())
    shown: list[int] = []
    row_of: dict[int, int] = {}
    repeats = []
    for block in find_blocks(costs.graph):
        first = len(shown)
        for task in range(block.start, block.stop):
            number = number_of.get(task)
            if number is None:
                continue
            original = number_of.get(block.start + (task - block.start) % block.length, number)
            if original == number:
                row_of[number] = len(shown)
                shown.append(number)
            else:
                row_of[number] = row_of[original]
        if block.count > 1:
            repeats.append((first, len(shown) - 1, block.count))
    return _Rows(tuple(shown), row_of, tuple(repeats))


def _part(costs: GraphCosts, number: int, top: int) -> list[str]:
    """Its number, its constants, and its task."""
    part = costs.atomic.parts[number]
    task = costs.graph.tasks[part.task]
    found = [
        f'<text x="12" y="{top + 15}" fill="#64748b">{number}</text>',
        f'<rect x="{_LEFT}" y="{top}" width="{_BOX}" height="22" rx="3" fill="#93c5fd">'
        f"<title>{escape(f'{task.path} {task.op}')}</title></rect>",
        f'<text x="{_LEFT + 6}" y="{top + 15}">{escape(_op(task.op))}'
        f'<tspan fill="#475569" font-size="10"> {escape(_fitting(task.path, 34 - len(_op(task.op))))}</tspan></text>',
    ]
    constants = _constants(costs, part)
    if constants:
        text = ", ".join(constants)
        label = text if len(text) <= 26 else f"{text[:23]}..."
        found.append(
            f'<rect x="44" y="{top + 1}" width="{_LEFT - 60}" height="20" rx="10" {_DASHED}>'
            f'<title>{escape(text)}</title></rect><path d="M{_LEFT - 16} {top + 11} H{_LEFT}" {_DASHED}/>'
            f'<text x="52" y="{top + 15}" font-size="10">{escape(label)}</text>'
        )
    return found


def _constants(costs: GraphCosts, part: Part) -> list[str]:
    """Copied tasks and weights of a part."""
    graph = costs.graph
    tasks = [graph.tasks[number] for number in (*part.constants, part.task)]
    read = (graph.value[name] for name in dict.fromkeys(name for task in tasks for name in task.inputs))
    weights = [value.path.rsplit(".", 1)[-1] or value.name for value in read if value.kind == "parameter"]
    return [*(_op(task.op) for task in tasks[:-1]), *weights]


def _edge(costs: GraphCosts, edge: tuple[int, int, str]) -> str:
    """A value as a dot on its way: straight to the next row, else in an arc on the right."""
    source, target, name = edge
    graph = costs.graph
    start, stop = _TOP + _ROW * source + 22, _TOP + _ROW * target
    size = short(graph.value[name].bytes(graph.batch, graph.sequence))
    tip = f"<title>{escape(name)}: {size}B</title>"
    if target == source + 1:
        x = _LEFT + _BOX // 2
        return (
            f'<path d="M{x} {start} V{stop}" stroke="#475569"/>'
            f'<circle cx="{x}" cy="{(start + stop) / 2}" r="3.5" fill="white" stroke="#475569">{tip}</circle>'
        )
    right = _LEFT + _BOX
    far = right + min(150, 14 + 5 * (target - source))
    start, stop = start - 8, stop + 8
    return (
        f'<path d="M{right} {start} C{far} {start} {far} {stop} {right} {stop}" fill="none" stroke="#94a3b8"/>'
        f'<circle cx="{(right + 3 * far) / 4:.0f}" cy="{(start + stop) / 2}" r="3.5" fill="white" '
        f'stroke="#475569">{tip}</circle>'
    )


def _fitting(path: str, characters: int) -> str:
    """A module, its last names only where all are too long."""
    while len(path) > characters:
        path = path.partition(".")[2]
    return path


def _op(name: str) -> str:
    """`linear` of `aten.linear.default`."""
    return name.split(".")[1 if "." in name else 0]
