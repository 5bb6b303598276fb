"""Stages for people: a row a stage with bars of forward and backward, as text and as SVG.

Owns the tables and the picture. Knows nothing of where pictures go.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def as_svg(found: Partition, labels: Sequence[str]) -> str:
    """Blocks on the left, grouped by stage; bars of forward and backward on the right, a line at the mean."""
    height = _TOP + _ROW * len(found.stages) + 24
    work = [_seconds(stage) for stage in found.stages]
    longest = max(work) or 1.0
    scale = (_WIDTH - _BARS - 190) / longest
    mean = sum(t * s.devices for t, s in zip(work, found.stages, strict=True))
    mean /= sum(stage.devices for stage in found.stages)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="22" font-size="14">{escape(summary(found))}</text>',
        f'<text x="8" y="{_TOP - 14}">blocks</text><text x="{_BARS}" y="{_TOP - 14}">forward and backward of a '
        "device; dashed: mean</text>",
    ]
    for number, stage in enumerate(found.stages):
        top = _TOP + _ROW * number
        parts += _blocks(stage, top)
        forward = stage.forward_seconds * scale
        parts += [
            f'<text x="8" y="{top + 34}" fill="#64748b">{escape(_names(labels, stage))}</text>',
            f'<text x="{_BARS - 110}" y="{top + 18}">stage {number} x {stage.devices}</text>',
            f'<rect x="{_BARS}" y="{top + 4}" width="{forward:.1f}" height="20" fill="{_FORWARD}"/>',
            f'<rect x="{_BARS + forward:.1f}" y="{top + 4}" width="{stage.backward_seconds * scale:.1f}" height="20" '
            f'fill="{_BACKWARD}"/>',
            f'<text x="{_BARS + _seconds(stage) * scale + 6:.1f}" y="{top + 18}">{_seconds(stage):.4g} s, '
            f"{stage.memory_bytes / 2**30:.3g} GiB</text>",
        ]
    x = _BARS + mean * scale
    parts.append(f'<path d="M{x:.1f} {_TOP} V{height - 24}" stroke="#0f172a" stroke-dasharray="4 3"/>')
    return "\n".join([*parts, "</svg>", ""])


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
