"""Look up an entry by name or alias, and say what was probably meant when there is none.

Owns the wording of E104 only. Knows neither models nor machines.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Protocol, TypeVar

from meshwright.errors import ConfigError


class Named(Protocol):
    """What the lookup needs of an entry."""

    @property
    def name(self) -> str:
        """The one name that is printed."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names that are understood."""


Entry = TypeVar("Entry", bound=Named)


def find_entry(name: str, entries: Sequence[Entry], *, kind: str) -> Entry:
    """The entry called `name`, by its name or an alias, ignoring case.

    Args:
        name: what the user wrote.
        entries: the table.
        kind: what the entries are, for the message: "model preset", "machine".

    Raises:
        ConfigError: E104, with the nearest name and the whole list.
    """
    spellings = {spelling.lower(): entry for entry in entries for spelling in (entry.name, *entry.aliases)}
    wanted = name.strip().lower()
    if wanted in spellings:
        return spellings[wanted]
    near = difflib.get_close_matches(wanted, spellings, n=1, cutoff=0.5)
    hint = f" Did you mean {spellings[near[0]].name!r}?" if near else ""
    listing = ", ".join(entry.name for entry in entries)
    raise ConfigError("E104", f"unknown {kind} {name!r}.{hint} Known: {listing}")
