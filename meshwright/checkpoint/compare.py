"""Whether a checkpoint is of the model that is to go on, and if not, which tensors differ, in few patterns.

Owns E501 and its text. Knows names, shapes and the sizes of presets; no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.manifest import Manifest
from meshwright.errors import CheckpointError

_MAX_LINES = 6
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same.

    Attributes:
        name: of the tensor.
        saved: shape in the checkpoint; None where it is only in the model.
        now: shape in the model; None where it is only in the checkpoint.
    """

    name: str
    saved: Shape | None
    now: Shape | None

    @property
    def what(self) -> str:
        """What is different, the same words for tensors that differ for the same reason."""
        if self.saved is None:
            return "only in the model"
        if self.now is None:
            return "only in the checkpoint"
        if len(self.saved) != len(self.now):
            return f"saved {self.saved}, now {self.now}"
        pairs = dict.fromkeys((a, b) for a, b in zip(self.saved, self.now, strict=True) if a != b)
        saved, now = (" x ".join(str(pair[i]) for pair in pairs) for i in (0, 1))
        return f"saved {saved}, now {now}"


def check_same_model(
    path: Path, manifest: Manifest, model: Mapping[str, Shape], *, numbers: Mapping[str, Any]
) -> None:
    """Raise E501 unless the checkpoint has exactly the model's tensors.

    Args:
        path: the checkpoint.
        manifest: its manifest.
        model: name to shape of all parameters and persistent buffers.
        numbers: sizes that keys of `model` set, by key; empty where the model is a user's.

    Raises:
        CheckpointError: E501.
    """
    aliases = manifest.run.aliases
    saved = {name: tensor.shape for name, tensor in manifest.model.items()}
    stored = {name: saved[aliases.get(name, name)] for name in (*saved, *aliases)}
    found = [
        Difference(name, stored.get(name), shape)
        for name, shape in model.items()
        if stored.get(name) != shape
    ]
    found += [Difference(name, shape, None) for name, shape in saved.items() if name not in model]
    if not found:
        return
    lines = pattern_lines(found, saved=manifest.run.numbers, now=numbers)
    count = "all in one pattern" if len(lines) == 1 else f"in {len(lines)} patterns"
    shown = lines[:_MAX_LINES] + ([f"and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else [])
    raise CheckpointError(
        "E501",
        f"checkpoint {path} is another model: {len(found)} of {len({*model, *saved})} tensors differ, {count}"
        + "".join(f"\n     {line}" for line in shown)
        + "\n     Set the model's keys as they were, or start without --resume.",
    )


def pattern_lines(
    differences: Iterable[Difference], *, saved: Mapping[str, Any], now: Mapping[str, Any]
) -> list[str]:
    """One line for each reason and pattern of names, the key that explains it in brackets."""
    by_reason: dict[str, list[Difference]] = {}
    for difference in differences:
        by_reason.setdefault(difference.what, []).append(difference)
    lines = []
    for what, members in by_reason.items():
        keys = _keys(members[0], saved, now)
        for pattern in group_names(member.name for member in members):
            lines.append(f"{pattern}  {what}{keys}")
    return lines


def _keys(difference: Difference, saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    changed = [key for key in now if key in saved and saved[key] != now[key]]
    if difference.saved is None or difference.now is None:
        keys = [key for key in changed if key == "num_layers"]
    else:
        pairs = zip(difference.saved, difference.now, strict=False)
        # An extent may be a multiple of the key's number, e.g. three times the width.
        keys = [key for a, b in pairs if a != b for key in changed if a * now[key] == b * saved[key]]
    return f"   ({', '.join(f'model.{key}' for key in dict.fromkeys(keys))})" if keys else ""


def group_names(names: Iterable[str]) -> list[str]:
    """Dotted names as few patterns: numbers become `*`, alternatives of one place stand in braces."""
    patterns = dict.fromkeys(
        tuple("*" if part.isdigit() else part for part in name.split(".")) for name in names
    )
    rows: Collection[tuple[str, ...]] = patterns
    for place in range(max((len(row) for row in rows), default=0)):
        merged: dict[tuple[object, ...], list[str]] = {}
        for row in rows:
            if place < len(row):
                merged.setdefault((row[:place], row[place + 1 :]), []).append(row[place])
            else:
                merged.setdefault((row, None), []).append("")
        rows = [
            (*before, _braces(parts), *after) if after is not None else before  # type: ignore[misc]
            for (before, after), parts in merged.items()
        ]
    return [".".join(row) for row in rows]


def _braces(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    inner = [item for part in parts for item in re.sub(r"[{}]", "", part).split(",")]
    return "{" + ",".join(inner) + "}"
