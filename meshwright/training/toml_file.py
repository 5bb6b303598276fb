"""TOML files with the line of every key, and the way back from dotted keys to TOML text.

Owns reading and writing of the text. Knows nothing of which keys are legal. `tomllib` gives no lines, so each
line is parsed once more on its own.
Simplification: inside a multi-line string a line that looks like `key = value` is taken for a key.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.training.units import toml_literal


@dataclass(frozen=True)
class TomlFile:
    """One parsed file: its path as given, nested values, and dotted key -> line (from 1)."""

    path: Path
    values: dict[str, object]
    lines: Mapping[str, int]

    def place(self, key: str) -> str:
        """`file:line` of a dotted key, or of the nearest table around it."""
        parts = key.split(".")
        while parts:
            line = self.lines.get(".".join(parts))
            if line is not None:
                return f"{self.path}:{line}"
            parts.pop()
        return str(self.path)


def read_toml(path: Path, *, named_by: str = "") -> TomlFile:
    """Read a TOML file. Raises E100 for a file that is missing, unreadable or not TOML.

    Args:
        path: the file.
        named_by: `file:line` that names this file, shown when it cannot be read.
    """
    try:
        text = path.read_bytes().decode()
        values = tomllib.loads(text)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        message = f"cannot read {str(path)!r}: {reason}. Working directory: {Path.cwd()}"
        raise ConfigError("E100", message, where=named_by) from None
    except UnicodeDecodeError as error:
        message = f"not UTF-8 at byte {error.start}; a TOML file is UTF-8 text"
        raise ConfigError("E100", message, where=str(path)) from None
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column \d+\)", str(error))
        where = f"{path}:{found[1]}" if found else str(path)
        message = f'not valid TOML: {error}. Texts stand in quotes: key = "value"'
        raise ConfigError("E100", message, where=where) from None
    return TomlFile(path, values, _lines(text))


def toml_text(values: Mapping[str, object], comments: Mapping[str, str]) -> str:
    """Dotted keys as a TOML file; keys with value None are left out. `comments` are put behind the values."""
    tables: dict[str, list[str]] = {}
    for key, value in values.items():
        if value is None:
            continue
        table, _, name = key.rpartition(".")
        comment = f"  # {comments[key]}" if key in comments else ""
        # Collected by table: a table stands once in a file, also where a subtable's keys come between.
        tables.setdefault(table, []).append(f"{name} = {toml_literal(value)}{comment}\n")
    return "\n".join(f"[{table}]\n{''.join(lines)}" for table, lines in tables.items())


def _lines(text: str) -> dict[str, int]:
    lines: dict[str, int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        header = _parse(line) if line.lstrip().startswith("[") else None
        if header is not None:
            table = next(_paths(header), ())
            lines.setdefault(".".join(table), number)
            continue
        for path in _paths(_parse(line) or _parse_key(line)):
            for length in range(len(table) + 1, len(table) + len(path) + 1):
                lines.setdefault(".".join((*table, *path)[:length]), number)
    return lines


def _parse(line: str) -> dict[str, object] | None:
    try:
        return tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return None


def _parse_key(line: str) -> dict[str, object]:
    """The key of a line whose value goes on below."""
    return _parse(f"{line.partition('=')[0]} = 0") or {} if "=" in line else {}


def _paths(tree: Mapping[str, object]) -> Iterator[tuple[str, ...]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from ((name, *rest) for rest in _paths(value))
        else:
            yield (name,)
