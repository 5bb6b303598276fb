"""Polynomials in the two sizes that a run chooses, batch and sequence, with exact coefficients.

Owns arithmetic, evaluation, fitting and the text form, e.g. `2*b*s^2 + 3*b`. Knows nothing of graphs.
Simplification: two symbols, no division; what is not a polynomial is not a formula.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

# (power of batch, power of sequence), or a pair of sizes
Powers = tuple[int, int]

_TERM = re.compile(
    r"(?P<coefficient>-?\d+(?:/\d+)?)?\*?(?P<b>b(?:\^(?P<bp>\d+))?)?\*?(?P<s>s(?:\^(?P<sp>\d+))?)?"
)


@dataclass(frozen=True)
class Formula:
    """A polynomial in batch and sequence.

    Attributes:
        terms: (powers, coefficient), sorted by powers; none is zero.
    """

    terms: tuple[tuple[Powers, Fraction], ...] = ()

    def __call__(self, batch: int, sequence: int) -> int:
        """The value at these sizes; an element count is a whole number, and a mean of fits is rounded."""
        return round(sum(c * batch**i * sequence**j for (i, j), c in self.terms))

    def __add__(self, other: FormulaLike) -> Formula:
        total = dict(self.terms)
        for powers, c in as_formula(other).terms:
            total[powers] = total.get(powers, Fraction(0)) + c
        return _made(total)

    def __sub__(self, other: FormulaLike) -> Formula:
        return self + as_formula(other) * -1

    def __mul__(self, other: FormulaLike) -> Formula:
        total: dict[Powers, Fraction] = {}
        for (i, j), c in self.terms:
            for (k, n), d in as_formula(other).terms:
                total[i + k, j + n] = total.get((i + k, j + n), Fraction(0)) + c * d
        return _made(total)

    __radd__ = __add__
    __rmul__ = __mul__

    @property
    def constant(self) -> int | None:
        """The number that this is at all sizes, or None."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and self.terms[0][0] == (0, 0):
            return int(self.terms[0][1])
        return None

    @property
    def uses(self) -> frozenset[str]:
        """Which of "batch" and "sequence" the value depends on."""
        names = set()
        for (i, j), _ in self.terms:
            names |= ({"batch"} if i else set()) | ({"sequence"} if j else set())
        return frozenset(names)

    def __str__(self) -> str:
        return " + ".join(_term_text(powers, c) for powers, c in reversed(self.terms)) or "0"


FormulaLike: TypeAlias = Formula | int | Fraction
BATCH = Formula((((1, 0), Fraction(1)),))
SEQUENCE = Formula((((0, 1), Fraction(1)),))
ZERO = Formula()


def as_formula(value: FormulaLike) -> Formula:
    """A number as a formula; a formula as it is."""
    if isinstance(value, Formula):
        return value
    return Formula((((0, 0), Fraction(value)),)) if value else ZERO


def product(factors: Iterable[FormulaLike]) -> Formula:
    """All factors multiplied; 1 of none."""
    result = as_formula(1)
    for factor in factors:
        result = result * factor
    return result


def total(parts: Iterable[Formula]) -> Formula:
    """The sum of many, in one pass."""
    sums: dict[Powers, Fraction] = {}
    for part in parts:
        for powers, c in part.terms:
            sums[powers] = sums.get(powers, Fraction(0)) + c
    return _made(sums)


def parse_formula(text: str) -> Formula:
    """The formula behind its text.

    Raises:
        ValueError: the text is none.
    """
    result: dict[Powers, Fraction] = {}
    for part in text.split("+"):
        found = _TERM.fullmatch(part.strip())
        if found is None or not part.strip():
            raise ValueError(f"{text!r} is no formula; one looks like 2*b*s^2 + 3*b")
        powers = (_power(found, "b"), _power(found, "s"))
        result[powers] = result.get(powers, Fraction(0)) + Fraction(found["coefficient"] or 1)
    return _made(result)


def fit(
    measured: Callable[[int, int], int], batches: tuple[int, ...], sequences: tuple[int, ...], check: Powers
) -> Formula | None:
    """The polynomial through what `measured(batch, sequence)` says.

    Args:
        measured: a whole number at each pair.
        batches: points; one more than the degree.
        sequences: the same.
        check: a pair outside of them.

    Returns:
        None where the check fails: it is no such polynomial.
    """
    result = total(
        _lagrange(BATCH, b, batches) * _lagrange(SEQUENCE, s, sequences) * measured(b, s)
        for b in batches
        for s in sequences
    )
    return result if result(*check) == measured(*check) else None


def _lagrange(symbol: Formula, at: int, points: tuple[int, ...]) -> Formula:
    """The polynomial that is 1 at `at` and 0 at the other points."""
    return product((symbol - other) * Fraction(1, at - other) for other in points if other != at)


def _made(terms: Mapping[Powers, Fraction]) -> Formula:
    return Formula(tuple(sorted((powers, c) for powers, c in terms.items() if c)))


def _power(found: re.Match[str], symbol: str) -> int:
    return int(found[symbol + "p"] or 1) if found[symbol] else 0


def _term_text(powers: Powers, c: Fraction) -> str:
    symbols = [name if p == 1 else f"{name}^{p}" for name, p in zip("bs", powers, strict=True) if p]
    return "*".join([*([str(c)] if c != 1 or not symbols else []), *symbols])
