"""What `plan.recompute` says: which modules keep what for backward, as plain data.

Owns the words and E240. What they do stands in `recompute/`.

| word | what is kept of a block until its backward |
|---|---|
| none | all that autograd saves |
| full | its input |
| every:k | the input of every k-th block |
| constant | of all blocks together only the first input; time grows with the square of their number |
| selective | all but what attention makes of queries and keys (scores, weights, masks) |
| selective:gelu+dropout | all but results of these operations |
| offload | all, in host memory |
| budget:BYTES | the least time within BYTES for all blocks together |
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import PlanError

KINDS = ("none", "full", "selective", "constant", "offload", "every", "budget")
_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True)
class Recomputation:
    """One word: what is kept.

    Attributes:
        kind: one of `KINDS`.
        amount: blocks of a segment (every), bytes a rank (budget), else 0.
        operations: names of torch's functions (selective); empty: attention.
    """

    kind: str
    amount: int = 0
    operations: tuple[str, ...] = ()

    def __str__(self) -> str:
        detail = "+".join(self.operations) or (str(self.amount) if self.amount else "")
        return f"{self.kind}:{detail}" if detail else self.kind


@dataclass(frozen=True)
class RecomputePlan:
    """Modules by pattern, the first that matches counts; empty: nothing is computed again.

    Attributes:
        rules: (pattern of module names, what is kept); the empty pattern stands for all repeated blocks.
    """

    rules: tuple[tuple[str, Recomputation], ...] = ()

    @property
    def is_active(self) -> bool:
        """Whether anything differs from plain training."""
        return any(kept.kind != "none" for _, kept in self.rules)

    def __str__(self) -> str:
        if len(self.rules) == 1 and not self.rules[0][0]:
            return str(self.rules[0][1])
        return ", ".join(f"{pattern} {kept}" for pattern, kept in self.rules) or "none"

    def to_value(self) -> str | dict[str, str]:
        """As in a run file; the inverse of `parse_recompute`."""
        if not self.rules:
            return "none"
        if len(self.rules) == 1 and not self.rules[0][0]:
            return str(self.rules[0][1])
        return {pattern: str(kept) for pattern, kept in self.rules}


NOTHING_AGAIN = RecomputePlan()


def parse_recompute(value: str | Mapping[str, Any]) -> RecomputePlan:
    """Read `full`, `every:4`, `budget:6 GiB` ..., or a table {pattern = word}.

    Raises:
        PlanError: E240 for a word that is none.
    """
    if isinstance(value, str):
        word = parse_word(value)
        return RecomputePlan() if word.kind == "none" else RecomputePlan((("", word),))
    return RecomputePlan(tuple((pattern, parse_word(str(word))) for pattern, word in value.items()))


def parse_word(text: str) -> Recomputation:
    """One word of the table above."""
    kind, colon, amount = text.strip().partition(":")
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PlanError("E240", f"{text!r} is none of {_words()}.{hint}")
    if kind == "selective" and colon:
        names = tuple(name.strip() for name in amount.split("+"))
        if not all(name.isidentifier() and not name.endswith("_") for name in names):
            raise PlanError(
                "E240",
                f'behind selective stand names of operations, not as in {text!r}: e.g. "selective:gelu+dropout".',
            )
        return Recomputation(kind, operations=names)
    if kind not in ("every", "budget"):
        if colon:
            raise PlanError("E240", f"{kind} takes no number, as in {text!r}. Write {kind!r}.")
        return Recomputation(kind)
    number = _size(amount) if kind == "budget" else (int(amount) if amount.strip().isdigit() else 0)
    if number < 1:
        example = "every:4" if kind == "every" else "budget:6 GiB"
        raise PlanError(
            "E240", f"behind {kind} stands a number above 0, not as in {text!r}: e.g. {example!r}."
        )
    return Recomputation(kind, number)


def _size(text: str) -> int:
    digits = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(digits) :].strip().lower().removesuffix("ytes").removesuffix("yte")
    unit = unit if unit != "b" else ""
    try:
        return int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError):
        return 0


def _words() -> str:
    return "none, full, selective, selective:OPS, constant, offload, every:k, budget:BYTES"
