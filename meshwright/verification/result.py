"""What a comparison found, as values, text and JSON. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

CHECK_NAMES = (
    "data",
    "loss",
    "activations",
    "gradients",
    "grad_norm",
    "parameters",
    "optimizer",
    "buffers",
    "replicas",
    "ties",
    "counts",
)
# Of a run on another layout, where one was made: see `verification/resumed.py`.
RESUME_CHECK = "resume"
# Order in which one step makes what the checks look at.
EXECUTION_ORDER = (
    "data",
    "activations",
    "loss",
    "gradients",
    "grad_norm",
    "counts",
    "parameters",
    "optimizer",
    "buffers",
    "ties",
    "replicas",
)

# What a check counts where that is not tensors.
_UNITS = MappingProxyType(
    {"data": "samples", "loss": "steps", "grad_norm": "steps", "ties": "ties", "counts": "steps"}
)


@dataclass(frozen=True)
class Wrong:
    """One tensor (or sample, or count) that is wrong.

    Attributes:
        check: that found it.
        name: of the tensor.
        step: training step, from 1; 0 before training.
        microbatch: micro-step, from 0; -1 for the whole step.
        order: position in the execution of its step.
        ranks: whose pieces are wrong.
        holders: who holds a piece.
        ratio: candidate / reference where it is one number for all wrong elements.
        share: part of the compared elements that are wrong.
        place: which rows or samples, in words.
        problem: what is wrong where that is no number.
        cause: a guess.
        source_rank: the rank whose part of a sum explains the error; None where that is unknown or no single one.
        is_one_number: the tensor has one element, which always has one ratio.
    """

    check: str
    name: str
    step: int
    microbatch: int = -1
    order: int = 0
    ranks: tuple[int, ...] = ()
    holders: tuple[int, ...] = ()
    ratio: float | None = None
    share: float = 0.0
    place: str = ""
    problem: str = ""
    cause: str = ""
    source_rank: int | None = None
    is_one_number: bool = False

    @property
    def sort_key(self) -> tuple[int, int, int, int, str]:
        """Earlier in execution is smaller."""
        phase = EXECUTION_ORDER.index(self.check)
        return (self.step, phase, self.microbatch, self.order, self.name)

    def describe(self) -> str:
        """One line: the tensor, how it is wrong, and where."""
        when = f"step {self.step}" if self.step else "before step 1"
        when += f" micro-step {self.microbatch}" if self.microbatch >= 0 else ""
        who = ""
        if self.ranks:
            every = set(self.ranks) == set(self.holders) and len(self.holders) > 1
            who = " on every rank" if every else f" on rank {', '.join(map(str, self.ranks))}"
        how = self.problem
        if not how and self.ratio is not None:
            exactly = "" if self.is_one_number else "exactly "
            how = f"{exactly}{self.ratio:.4f} x reference"
        if not how:
            how = "differs from the reference"
        where = f", {self.place}" if self.place else ""
        return f"{self.name}: {how} ({when}{who}{where})"


@dataclass(frozen=True)
class Check:
    """One line of the result.

    Attributes:
        name: of `CHECK_NAMES`, or `RESUME_CHECK`.
        ok: whether everything agreed.
        compared: tensors (or samples, or counts) compared.
        num_wrong: how many of them are wrong.
        worst_relative: largest difference by the norm rule; 0.0 where the check is of equality.
        worst_tensor: whose.
        first_wrong: the earliest wrong one in execution order, None if there is none.
        note: what people may want to know beside it.
    """

    name: str
    ok: bool
    compared: int
    num_wrong: int = 0
    worst_relative: float = 0.0
    worst_tensor: str | None = None
    first_wrong: Wrong | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """The contract's keys, and the details of the first wrong tensor."""
        return {
            "name": self.name,
            "ok": self.ok,
            "compared": self.compared,
            "wrong": self.num_wrong,
            "worst_relative": self.worst_relative,
            "worst_tensor": self.worst_tensor,
            "first_wrong": self.first_wrong.name if self.first_wrong else None,
            "detail": _wrong_json(self.first_wrong),
        }

    def line(self) -> str:
        """One line of the table, without the guess."""
        mark = "✓" if self.ok else "✗"
        text = f"  {mark} {self.name:<11} "
        if not self.ok:
            assert self.first_wrong is not None, f"check {self.name} failed without a finding"
            good = self.compared - self.num_wrong
            return f"{text}{good}/{self.compared}   first wrong {self.first_wrong.describe()}"
        if not self.compared:
            return f"{text}none"
        parts = [f"{text}{self.compared:<6,} {_UNITS.get(self.name, 'tensors'):<7}"]
        if self.worst_tensor:
            where = "" if self.worst_tensor == self.name else f"  {self.worst_tensor}"
            parts.append(f"worst relative {self.worst_relative:.1e}{where}")
        return "  ".join([*parts, *([self.note] if self.note else [])])


def _wrong_json(wrong: Wrong | None) -> dict[str, Any] | None:
    if wrong is None:
        return None
    return {
        "check": wrong.check,
        "tensor": wrong.name,
        "step": wrong.step,
        "microbatch": wrong.microbatch,
        "ranks": list(wrong.ranks),
        "ratio": wrong.ratio,
        "share": wrong.share,
        "place": wrong.place,
        "problem": wrong.problem,
        "cause": wrong.cause,
        "source_rank": wrong.source_rank,
        "text": wrong.describe(),
    }


@dataclass(frozen=True)
class VerifyResult:
    """Whether the candidate computed what one device computes, and if not, where it first did not.

    Attributes:
        checks: all that were made.
        reference: what the reference was, in words.
        candidate: what the candidate was, in words.
        model: which model, and what was cut of it.
        seconds: wall time of the whole comparison.
        peak_memory_bytes: `reference` and `candidate` (all ranks together), resident sets at their largest.
    """

    checks: tuple[Check, ...]
    reference: str
    candidate: str
    model: str
    seconds: float
    peak_memory_bytes: Mapping[str, int]

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(check.ok for check in self.checks)

    @property
    def first_wrong(self) -> Wrong | None:
        """The earliest wrong tensor of all checks, in execution order."""
        found = [check.first_wrong for check in self.checks if check.first_wrong is not None]
        return min(found, key=lambda wrong: wrong.sort_key, default=None)

    def check(self, name: str) -> Check:
        """The check called `name`."""
        return next(check for check in self.checks if check.name == name)

    def table(self) -> str:
        """The result as text."""
        lines = [
            f"reference  {self.reference}     candidate  {self.candidate}",
            f"model      {self.model}",
            *(check.line() for check in self.checks),
        ]
        verdict = "PASS" if self.ok else "FAIL"
        return "\n".join([*lines, *self.finding(), f"{verdict} in {self.seconds:.0f} s"])

    def finding(self) -> list[str]:
        """Lines that name the first wrong tensor and guess at the cause; none where all is right."""
        first = self.first_wrong
        if first is None:
            return []
        lines = [f"first      {first.check}  {first.describe()}"]
        return [*lines, f"           {first.cause}"] if first.cause else lines

    def to_json(self) -> dict[str, Any]:
        """The contract's keys: ok, reference, candidate, checks, seconds; and model, first_wrong, memory."""
        return {
            "ok": self.ok,
            "reference": self.reference,
            "candidate": self.candidate,
            "model": self.model,
            "checks": [check.to_json() for check in self.checks],
            "first_wrong": _wrong_json(self.first_wrong),
            "seconds": self.seconds,
            "peak_memory_bytes": dict(self.peak_memory_bytes),
        }
