"""A task graph for people: its blocks with what they cost, as text and as SVG.

Owns the tables and the picture. Repeated blocks are one row. Knows nothing of where pictures go.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from meshwright.graph.formula import Formula, total
from meshwright.graph.repeats import Block, find_blocks
from meshwright.graph.task_graph import Task, TaskGraph

_UNITS = ("", "k", "M", "G", "T", "P", "E")
# Sizes of the SVG in pixels.
_ROW, _TOP, _WIDTH, _LABEL, _MOST_ROWS = 34, 70, 860, 300, 400


@dataclass(frozen=True)
class Row:
    """One block.

    Attributes:
        label: its module, else its first and last op.
        count: how often it repeats; numbers are of one.
        tasks: operations.
        parameters: elements that it is the first to read.
        flops: forward.
        saved: bytes that autograd keeps.
        leaving: bytes of results that later blocks read.
    """

    label: str
    count: int
    tasks: int
    parameters: int
    flops: Formula
    saved: Formula
    leaving: Formula


def rows_of(graph: TaskGraph) -> tuple[Row, ...]:
    """A row a block; repeats of a block are equal, so the first one stands for all."""
    seen: set[str] = set()
    rows = []
    for block in find_blocks(graph):
        rows.append(_row(graph, block, seen))
        for task in graph.tasks[block.start : block.stop]:
            seen |= {graph.value[name].storage for name in task.inputs}
    return tuple(rows)


def as_text(graph: TaskGraph, batch: int, sequence: int) -> str:
    """A table of blocks with their costs at these sizes, the totals as formulas, and the notes.

    Raises:
        ConfigError: E134 for sizes that the graph has no formula for.
    """
    graph.check_sizes(batch, sequence)
    cells: list[tuple[str, ...]] = [("block", "", "tasks", "parameters", "FLOPs", "saved", "leaving")]
    for row in rows_of(graph):
        costs = [formula(batch, sequence) for formula in (row.flops, row.saved, row.leaving)]
        times = f"x {row.count}" if row.count > 1 else ""
        cells.append(
            (
                row.label,
                times,
                str(row.tasks),
                f"{row.parameters:,}",
                short(costs[0]),
                *(f"{short(cost)}B" for cost in costs[1:]),
            )
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [_summary(graph, batch, sequence)]
    for line in cells:
        first = f"  {line[0]:<{widths[0]}}  {line[1]:<{widths[1]}}"
        rest = (f"{cell:>{width}}" for cell, width in zip(line[2:], widths[2:], strict=True))
        lines.append("  ".join([first, *rest]).rstrip())
    lines += [
        f"forward FLOPs   {graph.flops()}",
        f"backward FLOPs  {graph.backward_flops()}",
        f"saved bytes     {graph.saved_bytes()}",
    ]
    lines += [f"tied            {' = '.join(group)}" for group in graph.ties()]
    return "\n".join([*lines, *graph.notes])


def as_svg(graph: TaskGraph, batch: int, sequence: int) -> str:
    """A box a block from top to bottom, as long as its share of the FLOPs of all blocks; raises as `as_text`."""
    graph.check_sizes(batch, sequence)
    rows = rows_of(graph)[:_MOST_ROWS]
    most = max((row.flops(batch, sequence) * row.count for row in rows), default=0) or 1
    height, width = _TOP + _ROW * len(rows) + 10, _LABEL + _WIDTH
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="22" font-size="14">{escape(_summary(graph, batch, sequence))}</text>',
        f'<text x="8" y="44" fill="#64748b">b {batch}, s {sequence}; boxes: forward FLOPs of all repeats</text>',
    ]
    for i, row in enumerate(rows):
        top = _TOP + _ROW * i
        flops = row.flops(batch, sequence)
        times = f"{row.count} x " if row.count > 1 else ""
        length = max(2, round(flops * row.count / most * (_WIDTH - 260)))
        tip = f"{times}{row.tasks} tasks, {row.parameters:,} parameters, FLOPs {row.flops}"
        saved, leaving = row.saved(batch, sequence), row.leaving(batch, sequence)
        parts += [
            f'<text x="8" y="{top + 17}">{escape(times + row.label)}</text>',
            f'<rect x="{_LABEL}" y="{top + 2}" width="{length}" height="{_ROW - 12}" rx="3" fill="#93c5fd">'
            f"<title>{escape(tip)}</title></rect>",
            f'<text x="{_LABEL + length + 8}" y="{top + 17}">{short(flops)} FLOPs, keeps {short(saved)}B, '
            f"passes on {short(leaving)}B</text>",
        ]
        if i + 1 < len(rows):
            parts.append(f'<path d="M20 {top + 22} V{top + _ROW + 4}" stroke="#94a3b8"/>')
    return "\n".join([*parts, "</svg>", ""])


def short(number: float) -> str:
    """Three digits and a unit of thousands."""
    for unit in _UNITS:
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}Z"


def _summary(graph: TaskGraph, batch: int, sequence: int) -> str:
    sizes = f"batch {batch}" + (f", sequence {sequence}" if graph.sequence else "")
    flops = short(graph.flops()(batch, sequence))
    return (
        f"{graph.name} ({graph.source}): {len(graph.tasks)} tasks, {graph.num_parameters():,} parameters; "
        f"{sizes}: {flops} forward FLOPs, {short(graph.saved_bytes()(batch, sequence))}B saved"
    )


def _row(graph: TaskGraph, block: Block, seen: set[str]) -> Row:
    first = graph.tasks[block.start : block.start + block.length]
    read = {
        graph.value[name].storage: graph.value[name]
        for task in first
        for name in task.inputs
        if graph.value[name].kind == "parameter" and graph.value[name].storage not in seen
    }
    last = block.start + block.length
    leaving = [
        graph.value[name]
        for task in first
        for name in task.outputs
        if name and graph.last_user.get(name, -1) >= last and not graph.value[name].is_constant
    ]
    return Row(
        label=block.path or _label(first),
        count=block.count,
        tasks=block.length,
        parameters=sum(value.numel(0, 0) for value in read.values()),
        flops=total(task.flops for task in first),
        saved=graph.saved_bytes(first),
        leaving=total(value.bytes for value in leaving),
    )


def _label(tasks: tuple[Task, ...]) -> str:
    """Modules at both ends; ops where there are none."""
    ends = [task.path or task.op.split(".")[1 if "." in task.op else 0] for task in (tasks[0], tasks[-1])]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} .. {ends[1]}"
