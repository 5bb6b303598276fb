"""One code of an error or a warning, for the tables beside this file. Owns the form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CodeEntry:
    """One code: a title of one line, what it means, and what a user can do."""

    code: str
    title: str
    meaning: str
    fix: str
