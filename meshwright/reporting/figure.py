"""A figure of a report as data, or the reason why it is not there. Knows nothing of what is shown."""

from __future__ import annotations

from dataclasses import dataclass

NO_RESULT = (
    "the folder's result.json does not say it: the run goes on, ended early, or is of an older version."
)


@dataclass(frozen=True)
class Figure:
    """One drawing with its data.

    Attributes:
        anchor: stable name of the place in the page.
        title: what it is of.
        help: one sentence on how to read it.
        drawing: SVG; empty for a table alone.
        columns: of the table.
        rows: of the table.
        num_marks: marks (bars, boxes, points of lines) in the drawing.
    """

    anchor: str
    title: str
    help: str
    drawing: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    num_marks: int = 0


@dataclass(frozen=True)
class Missing:
    """A figure that is not there, and why."""

    anchor: str
    title: str
    why: str
