"""Plans in a notebook: the table with a bar of memory each, time against memory, and a schedule over time.

Owns these drawings; each is complete in itself, without a style sheet, a script or a request. Text takes the colour of
the page that it stands in; the schedule and the front have their own ground. Knows nothing of how plans are found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from types import MappingProxyType

from meshwright.planner.plans import Plan, Plans, describe, rank_order
from meshwright.planner.request import Request
from meshwright.planner.runnable import plan_keys
from meshwright.planner.standing import Priced
from meshwright.reporting.picture import Picture
from meshwright.schedule.draw import as_svg, summary
from meshwright.schedule.timing import run
from meshwright.simulation.host import num_parts
from meshwright.simulation.job import Layout, num_microbatches
from meshwright.simulation.pipeline import pipeline_of
from meshwright.simulation.prediction import percent_text, predict

# Colours that colour-blind people tell apart (Okabe and Ito, 2008), by what memory is of.
COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "weights": "#0072b2",
        "gradients": "#56b4e9",
        "optimizer": "#009e73",
        "gathered": "#f0e442",
        "activations": "#d55e00",
        "logits": "#e69f00",
        "communication": "#cc79a7",
        "reserve": "#999999",
    }
)
# Of a schedule; of a row, so that each is wider than its frame.
MOST_BOXES, MOST_IN_ROW = 4000, 320
MOST_NODES = 16
_GIB = 2**30
_BAR = 240
_SPLIT = ("zb-h1", "zb-h2", "zb-v", "dualpipe")  # gradients of inputs and weights apart
_SIDE = 14
_CELL = "padding:.15em .7em .15em 0;text-align:"


def plans_table(found: Plans) -> str:
    """HTML: the question, a row a plan, what memory is of, and which rank is what."""
    request = found.request
    work, where = request.work, request.cluster
    heads = (
        "",
        "plan",
        "step",
        "tokens/s a device",
        "MFU",
        f"memory of {request.usable_bytes / _GIB:.1f} GiB",
    )
    head = "".join(f'<th scope="col" style="{_CELL}left">{escape(text)}</th>' for text in heads)
    rows = "\n".join(_row(number, item, request) for number, item in enumerate(found.plans, start=1))
    shown = [name for name in COLOURS if any(asdict(item.predicted.memory)[name] for item in found.plans)]
    legend = " ".join(
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:.8em;height:.8em;'
        f'background:{COLOURS[name]}"></span> {name}</span>'
        for name in shown
    )
    best = found.best.layout
    nodes = f", {MOST_NODES} of {where.num_nodes:,}" if where.num_nodes > MOST_NODES else ""
    starred = "<br>* train does not run it today" if any(item.obstacle for item in found.plans) else ""
    return (
        f'<div class="meshwright-plans"><div>{escape(work.model.name)} · {where.num_devices:,} x '
        f"{escape(where.machine.name)} · {work.global_batch:,} x {work.seq_len:,} tokens a step</div>\n"
        f'<table style="border-collapse:collapse"><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>\n'
        f"<div>{legend}</div>\n<div>ranks of 1, inside out: {escape(rank_order(best))}; searched {found.searched:,}, "
        f"refused {sum(found.rejected.values()):,}{starred}</div>\n{_mesh_map(request, best)}"
        f"<div>a row a node{nodes}: colours are stages, shades groups of tp; point at one for its place</div></div>"
    )


def _row(number: int, item: Plan, request: Request) -> str:
    own = item.predicted
    star = "*" if item.obstacle else ""
    cells = (
        ("right", f"{number}{star}"),
        ("left", escape(describe(own.layout))),
        ("right", f"{own.step.total:.3g} s"),
        ("right", f"{own.tokens_per_second_per_device:,.0f}"),
        ("right", percent_text(own.mfu)),
        ("left", _bar(item, request.usable_bytes)),
    )
    text = "".join(f'<td style="{_CELL}{side}">{cell}</td>' for side, cell in cells)
    return f'<tr title="{escape(item.obstacle or item.why)}">{text}</tr>'


def _bar(item: Plan, usable: float) -> str:
    """Memory by category in front of a frame that is all that a plan may take."""
    parts, x = [], 0.0
    for name, value in asdict(item.predicted.memory).items():
        width = _BAR * value / usable
        if value:
            parts.append(
                f'<rect class="mark" x="{x:.2f}" y="1" width="{width:.2f}" height="12" fill="{COLOURS[name]}">'
                f"<title>{name} {value / _GIB:.2f} GiB</title></rect>"
            )
        x += width
    frame = f'<rect x=".5" y=".5" width="{_BAR}" height="13" fill="none" stroke="currentColor"/>'
    return (
        f'<svg width="{_BAR + 1}" height="14" role="img" aria-label="memory" style="vertical-align:middle">'
        f"{''.join(parts)}{frame}</svg> {item.predicted.memory.peak / _GIB:.1f} GiB"
    )


def _mesh_map(request: Request, layout: Layout) -> str:
    """A square a device, a row a node: coloured by the stage of the pipeline, shaded by the group of tp."""
    in_node, palette = request.cluster.devices_per_node, list(COLOURS.values())
    shown = min(request.cluster.num_devices, MOST_NODES * in_node)
    cells = []
    for rank in range(shown):
        place = coordinates(layout, rank)
        said = " ".join(f"{axis} {at}" for axis, at in place.items() if getattr(layout, axis) > 1)
        x, y = rank % in_node * _SIDE, rank // in_node * _SIDE
        cells.append(
            f'<rect class="mark" x="{x}" y="{y}" width="{_SIDE - 2}" height="{_SIDE - 2}" '
            f'fill="{palette[place["pp"] % len(palette)]}" fill-opacity="{0.6 if rank // layout.tp % 2 else 1}">'
            f"<title>{f'rank {rank}: {said}'.rstrip(': ')}</title></rect>"
        )
    height, width = -(-shown // in_node) * _SIDE, min(shown, in_node) * _SIDE
    return f'<svg width="{width}" height="{height}" role="img" aria-label="ranks of plan 1">{"".join(cells)}</svg>'


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Where a rank is on each axis of a layout, in its rank order."""
    order = ("tp", "pp", "cp", "dp") if layout.pipeline_inside else ("tp", "cp", "dp", "pp")
    found = {}
    for axis in order:
        size = getattr(layout, axis)
        found[axis] = rank % size
        rank //= size
    return found


# Time against memory.

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 320, 60, 20, 40, 40
_NEAR = 14
_MOST_TICKS = 5


def draw_front(found: Plans) -> Picture:
    """A point a layout of the front, joined by a line; plans with their numbers."""
    front = found.front
    numbered = [
        Priced(item.layout, item.predicted.step.total, item.predicted.memory.peak) for item in found.plans
    ]
    everything = [*front, *numbered]
    times, sizes = [item.seconds for item in everything], [item.bytes / _GIB for item in everything]
    across = _scale(times, _LEFT, _WIDTH - _RIGHT)
    up = _scale(sizes, _HEIGHT - _BOTTOM, _TOP)
    places = [(across.at(item.seconds), up.at(item.bytes / _GIB)) for item in front]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    points = f'<polyline points="{joined}" fill="none" stroke="#0072b2" stroke-opacity=".4"/>' + "".join(
        f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#0072b2">'
        f"<title>{escape(_said(item))}</title></circle>"
        for (x, y), item in zip(places, front, strict=True)
    )
    rings = "".join(
        f'<circle cx="{across.at(item.seconds):.1f}" cy="{up.at(item.bytes / _GIB):.1f}" r="4" fill="none" '
        f'stroke="#a03c00"/>'
        for item in numbered
    )
    numbers = rings + "".join(
        f'<text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle" fill="#a03c00">{text}</text>'
        for text, x, y in _labels(numbered, across, up)
    )
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="12"><rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
        f"{_axes(across, up)}{points}{numbers}</svg>"
    )
    rows = tuple((item.seconds, item.bytes, plan_keys(item.layout)) for item in front)
    return Picture(svg, tuple(map(_said, front)), ("step_seconds", "peak_bytes", "keys"), rows)


def _labels(numbered: Sequence[Priced], across: _Scale, up: _Scale) -> Iterator[tuple[str, float, float]]:
    """Numbers of plans with their places; those too near to each other share one."""
    groups: list[tuple[list[int], float, float]] = []
    for number, item in enumerate(numbered, start=1):
        x, y = across.at(item.seconds), up.at(item.bytes / _GIB)
        near = [one for one in groups if abs(one[1] - x) < _NEAR * len(one[0]) and abs(one[2] - y) < _NEAR]
        if near:
            near[0][0].append(number)
        else:
            groups.append(([number], x, y))
    return ((",".join(map(str, numbers)), x, y) for numbers, x, y in groups)


def _said(item: Priced) -> str:
    return f"{item.seconds:.4g} s  {item.bytes / _GIB:.1f} GiB  {describe(item.layout)}"


@dataclass(frozen=True)
class _Scale:
    """Values from `low` to `high` lie from `start` to `end`, in pixels."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The place of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def _scale(values: Sequence[float], start: float, end: float) -> _Scale:
    """A little wider than the values on both sides."""
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.05 * high
    return _Scale(low - margin, high + margin, start, end)


def _axes(across: _Scale, up: _Scale) -> str:
    ink = 'fill="#404040"'
    floor, middle = _HEIGHT - _BOTTOM, (_LEFT + _WIDTH - _RIGHT) / 2
    lines = f'<path d="M{_LEFT} {_TOP}V{floor}H{_WIDTH - _RIGHT}" fill="none" stroke="#808080"/>'
    ticks = "".join(
        f'<text x="{across.at(value):.1f}" y="{floor + 16}" text-anchor="middle" {ink}>{value:.6g}</text>'
        for value in _ticks(across)
    ) + "".join(
        f'<text x="{_LEFT - 6}" y="{up.at(value) + 4:.1f}" text-anchor="end" {ink}>{value:.6g}</text>'
        for value in _ticks(up)
    )
    names = (
        f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle" {ink}>seconds of a step</text>'
        f'<text x="6" y="16" {ink}>GiB of the fullest rank; numbers: plans of the table</text>'
    )
    return lines + ticks + names


def _ticks(scale: _Scale) -> list[float]:
    """Round numbers in its range, at most five."""
    rough = (scale.high - scale.low) / _MOST_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(scale.low / step)
    return [step * number for number in range(first, math.floor(scale.high / step) + 1)]


# A schedule over time.


def draw_schedule(request: Request, layout: Layout) -> Picture:
    """The order of a plan's micro-batches over time, with seconds of its stages.

    Of a step with more boxes than can be told apart the first micro-batches are drawn, as a step of their own; the
    text says so.
    """
    count = num_microbatches(request.work, layout)
    each = (3 if layout.schedule in _SPLIT else 2) * num_parts(layout)
    shown = max(1, min(count, MOST_BOXES // (each * layout.pp), MOST_IN_ROW // each))
    work = replace(request.work, global_batch=shown * layout.dp * layout.micro_batch)
    made = pipeline_of(work if shown < count else request.work, layout, request.cluster)
    lines, note = [describe(layout), summary(made.schedule, made.durations)], ""
    if shown < count:
        step = predict(request.work, layout, request.cluster).step
        note = (
            f"drawn: {shown:,} of {count:,} micro-batches, as if they were all; of the whole step the bubble is "
            f"{step.bubble / step.total:.1%}"
        )
        lines.append(note)
    rows = tuple(
        (rank, str(item.action), item.start, item.end)
        for rank, line in enumerate(run(made.schedule, made.durations))
        for item in line
    )
    return Picture(
        as_svg(made.schedule, made.durations, note=note), tuple(lines), ("rank", "action", "from", "to"), rows
    )
