"""Stages for people: a row a stage with bars of forward and backward, as text and as SVG.

Owns the tables and the picture. Knows nothing of where pictures go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from meshwright.partitioning.partition import Partition, Stage

_BAR = 40
# Sizes of the SVG in pixels.
_ROW, _TOP, _BLOCKS, _BARS, _WIDTH = 44, 84, 330, 460, 1100
_FORWARD, _BACKWARD, _BLOCK = "#93c5fd", "#86efac", "#e2e8f0"


def as_text(found: Partition, labels: Sequence[str]) -> str:
    """A line a stage: blocks, devices, seconds, memory, a bar of its time against the longest.

    Args:
        found: the plan.
        labels: a name a block.
    """
    longest = max(_seconds(stage) for stage in found.stages) or 1.0
    lines = [summary(found)]
    for number, stage in enumerate(found.stages):
        forward = round(_BAR * stage.forward_seconds / longest)
        both = round(_BAR * _seconds(stage) / longest)
        lines.append(
            f"stage {number:<3} blocks {stage.first:>3} to {stage.last:<3} devices {stage.devices:<3} "
            f"F {stage.forward_seconds:.4g} s  B {stage.backward_seconds:.4g} s  "
            f"{stage.memory_bytes / 2**30:.3g} GiB  {'F' * forward}{'B' * (both - forward)}"
        )
        lines.append(f"          {_names(labels, stage)}")
    return "\n".join([*lines, *found.notes])


def summary(found: Partition) -> str:
    """Objective, value, bound and gap in one line."""
    batches = "micro-batch" if found.num_microbatches == 1 else "micro-batches"
    certificate = "no plan is better" if found.gap < 1e-9 else f"at most {found.gap:.1%} above the best"
    return (
        f"{len(found.stages)} stages of {found.num_blocks} blocks · {found.num_microbatches} {batches} · "
        f"{found.objective} {found.value:.6g} s: {certificate} · longest {found.imbalance:.1%} above the mean"
    )


@dataclass(frozen=True)
class Pane:
    """A picture that may stand beside others; pixels.

    Attributes:
        width: with margins.
        height: with margins.
        shapes: elements of SVG.
    """

    width: int
    height: int
    shapes: tuple[str, ...]


def as_svg(*panes: Pane) -> str:
    """Pictures side by side."""
    width, height = sum(pane.width for pane in panes), max(pane.height for pane in panes)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    left = 0
    for pane in panes:
        lines += [f'<g transform="translate({left} 0)">', *pane.shapes, "</g>"]
        left += pane.width
    return "\n".join([*lines, "</svg>", ""])


def stages_pane(found: Partition, labels: Sequence[str]) -> Pane:
    """Blocks on the left, grouped by stage; bars of forward and backward on the right, a line at the mean."""
    height = _TOP + _ROW * len(found.stages) + 24
    work = [_seconds(stage) for stage in found.stages]
    scale = (_WIDTH - _BARS - 190) / (max(work) or 1.0)
    mean = sum(t * s.devices for t, s in zip(work, found.stages, strict=True))
    mean /= sum(stage.devices for stage in found.stages)
    shapes = [
        f'<text x="8" y="22" font-size="14">{escape(summary(found))}</text>',
        f'<text x="8" y="{_TOP - 14}">blocks</text><text x="{_BARS}" y="{_TOP - 14}">forward and backward of a '
        "device; dashed: mean</text>",
    ]
    for number, stage in enumerate(found.stages):
        top = _TOP + _ROW * number
        shapes += [
            *_blocks(stage, top),
            f'<text x="8" y="{top + 34}" fill="#64748b">{escape(_names(labels, stage))}</text>',
            f'<text x="{_BARS - 110}" y="{top + 18}">stage {number} x {stage.devices}</text>',
            *_bars(stage, top, scale),
        ]
    x = _BARS + mean * scale
    shapes.append(f'<path d="M{x:.1f} {_TOP} V{height - 24}" stroke="#0f172a" stroke-dasharray="4 3"/>')
    return Pane(_WIDTH, height, tuple(shapes))


def _bars(stage: Stage, top: int, scale: float) -> list[str]:
    forward, both = stage.forward_seconds * scale, _seconds(stage) * scale
    return [
        f'<rect x="{_BARS}" y="{top + 4}" width="{forward:.1f}" height="20" fill="{_FORWARD}"/>',
        f'<rect x="{_BARS + forward:.1f}" y="{top + 4}" width="{both - forward:.1f}" height="20" '
        f'fill="{_BACKWARD}"/>',
        f'<text x="{_BARS + both + 6:.1f}" y="{top + 18}">{_seconds(stage):.4g} s, '
        f"{stage.memory_bytes / 2**30:.3g} GiB</text>",
    ]


def _blocks(stage: Stage, top: int) -> list[str]:
    count = stage.last - stage.first + 1
    width = _BLOCKS / count
    gap = 1 if width > 3 else 0
    return [
        f'<rect x="{8 + width * i:.1f}" y="{top + 4}" width="{width - gap:.1f}" height="16" fill="{_BLOCK}">'
        f"<title>block {stage.first + i}</title></rect>"
        for i in range(count)
    ]


def _seconds(stage: Stage) -> float:
    return stage.forward_seconds + stage.backward_seconds


def _names(labels: Sequence[str], stage: Stage) -> str:
    ends = [labels[stage.first].split(" .. ")[0], labels[stage.last].split(" .. ")[-1]]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} .. {ends[1]}"
