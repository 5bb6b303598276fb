"""Sections of docs/parity.md: each script replaces its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "parity.md"


def commit() -> str:
    """The commit that a result belongs to; ends with `-dirty` where the tree has changes."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def write_section(text: str) -> None:
    """Put `text`, whose first line is its heading, in place of the section of that heading, or at the end."""
    old = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    sections = [f"{part.strip()}\n" for part in _split(old)]
    heading = text.splitlines()[0]
    new = f"{text.strip()}\n"
    found = [i for i, section in enumerate(sections) if section.splitlines()[0] == heading]
    if found:
        sections[found[0]] = new
    else:
        sections.append(new)
    DOCUMENT.write_text("\n".join(sections))


def _split(document: str) -> list[str]:
    """Parts that begin with a heading of the first or second level."""
    parts: list[list[str]] = []
    for line in document.splitlines():
        if line.startswith(("# ", "## ")) or not parts:
            parts.append([])
        parts[-1].append(line)
    return ["\n".join(part) for part in parts]
