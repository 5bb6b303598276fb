"""Pictures of a schedule over time: a row a rank, as text and as SVG.

Times are those of `timing.py`, all stages alike unless durations are given; a letter or a colour a kind, a number a
micro-batch. Knows nothing of where pictures go.
"""

from __future__ import annotations

from html import escape

from meshwright.schedule.action import Action, Schedule
from meshwright.schedule.check import peak_in_flight
from meshwright.schedule.timing import Durations, Timed, bubble_of, makespan, run

_COLOURS = {"F": "#93c5fd", "B": "#86efac", "I": "#86efac", "W": "#fcd34d"}
_MEANING = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
# Sizes of the SVG in pixels.
_ROW, _LEFT, _TOP, _WIDTH = 26, 64, 46, 1200
_MOST_COLUMNS = 240


def as_text(schedule: Schedule, durations: Durations | None = None) -> str:
    """Columns of one time unit each (the shortest action); `·` is idle.

    A cell is a kind and a micro-batch, with the stage before it where ranks hold several.
    """
    times = durations or Durations.equal(schedule.num_stages)
    timed = run(schedule, times)
    unit = min(item.end - item.start for line in timed for item in line)
    columns = round(makespan(schedule, times) / unit)
    lines = [summary(schedule, times)]
    if columns > _MOST_COLUMNS:
        return f"{lines[0]}\n({columns} columns: too many for text; write the picture with --out)"
    labels = [[_label(schedule, item.action) for item in line] for line in timed]
    width = max(len(label) for line in labels for label in line)
    for rank, line in enumerate(timed):
        cells = ["·" * width] * columns
        for item, label in zip(line, labels[rank], strict=True):
            for column in range(round(item.start / unit), round(item.end / unit)):
                cells[column] = f"{label:<{width}}"
        lines.append(f"rank {rank:<3}" + " ".join(cells).rstrip())
    return "\n".join(lines)


def as_svg(schedule: Schedule, durations: Durations | None = None, *, note: str = "") -> str:
    """A box an action, as wide as it is long; idle time stays white. `note` stands behind the summary."""
    times = durations or Durations.equal(schedule.num_stages)
    title = " · ".join(filter(None, (summary(schedule, times), note)))
    timed = run(schedule, times)
    scale = _WIDTH / makespan(schedule, times)
    height = _TOP + schedule.num_ranks * _ROW + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 8} {height}" '
        f'width="{_LEFT + _WIDTH + 8}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_LEFT + _WIDTH + 8}" height="{height}" fill="white"/>',
        f'<text x="8" y="20" font-size="14">{escape(title)}</text>',
    ]
    for rank, line in enumerate(timed):
        top = _TOP + rank * _ROW
        parts.append(f'<text x="8" y="{top + 17}">rank {rank}</text>')
        parts += [_box(schedule, item, top, scale) for item in line]
    kinds = [kind for kind in _MEANING if any(i.action.op == kind for line in timed for i in line)]
    for number, kind in enumerate(kinds):
        x, y = _LEFT + number * 150, height - 26
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_COLOURS[kind]}" stroke="#666"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 11}">{kind}: {_MEANING[kind]}</text>')
    return "\n".join([*parts, "</svg>"])


def summary(schedule: Schedule, durations: Durations) -> str:
    """Name, sizes, idle part and activations in one line."""
    peaks = peak_in_flight(schedule)
    kept = f"{peaks[0]}" if len(set(peaks)) == 1 else " ".join(map(str, peaks))
    stages = "" if schedule.num_stages == schedule.num_ranks else f" · {schedule.num_stages} stages"
    ranks = "1 rank" if schedule.num_ranks == 1 else f"{schedule.num_ranks} ranks"
    batches = "micro-batch" if schedule.num_microbatches == 1 else "micro-batches"
    return (
        f"{schedule.name} · {ranks}{stages} · {schedule.num_microbatches} {batches} · "
        f"bubble {bubble_of(schedule, durations):.1%} of the step · activations kept {kept}"
    )


def _label(schedule: Schedule, action: Action) -> str:
    stage = f"{action.stage}" if schedule.num_stages > schedule.num_ranks else ""
    return f"{stage}{action.op}{action.microbatch}"


def _box(schedule: Schedule, item: Timed, top: int, scale: float) -> str:
    x, width = _LEFT + item.start * scale, (item.end - item.start) * scale
    label = str(item.action.microbatch)
    text = ""
    if width > 7 * len(label):
        text = f'<text x="{x + width / 2:.1f}" y="{top + 17}" text-anchor="middle">{label}</text>'
    # A rank's second stage is darker, so that chunks and directions are told apart.
    later = item.action.slot or item.action.stage // schedule.num_ranks
    shade = f' stroke-width="{1 + later}"' if later else ""
    return (
        f'<g><title>{item.action} {item.start:g}..{item.end:g}</title><rect x="{x:.1f}" y="{top + 2}" '
        f'width="{width:.1f}" height="{_ROW - 4}" fill="{_COLOURS[item.action.op]}" stroke="#666"{shade}/>{text}</g>'
    )
