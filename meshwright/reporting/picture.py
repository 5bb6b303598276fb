"""A picture for a notebook: SVG where pictures are shown, lines of text where not. Knows nothing of what it is of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import writing


@dataclass(frozen=True, repr=False)
class Picture:
    """A drawing with its data.

    Attributes:
        svg: the drawing, complete in itself.
        lines: what it says, as text.
        columns: of the rows.
        rows: the data, a row a mark.
    """

    svg: str
    lines: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]

    def save(self, path: str | Path) -> Path:
        """Write the SVG.

        Raises:
            ConfigError: E297 where it cannot be written.
        """
        with writing(Path(path)):
            Path(path).write_text(self.svg, encoding="utf-8")
        return Path(path)

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_svg_(self) -> str:
        return self.svg
