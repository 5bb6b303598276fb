"""Whose part of a sum is wrong: a few elements of each rank's contribution against the error of the sum. No torch.

If one rank's part is in a gradient s times, and not once, then the error is (s - 1) times that part, in every element;
no other rank's part explains it. Owns the fit. Must not know how contributions are seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Of one tensor; a fit of one number to so many is no coincidence.
_NUM_SAMPLES = 32
# What a fit may leave of the error. Rounding leaves less, another rank's part more.
_RESIDUAL = 1e-3

Elements = Mapping[int, float]


@dataclass(frozen=True)
class GradientSamples:
    """What one rank knows of some elements of one parameter's gradient in one step.

    Attributes:
        part: what this rank put into the sum, by flat element, normalised as the sum is.
        summed: what came out, of the elements that this rank holds; empty where its piece is right.
        expected: the same of the reference.
    """

    part: Elements
    summed: Elements
    expected: Elements


@dataclass(frozen=True)
class Source:
    """One rank whose part is in a sum `factor` times."""

    rank: int
    factor: float

    def describe(self) -> str:
        """A sentence."""
        if abs(self.factor) < _RESIDUAL:
            return f"Rank {self.rank}'s part of the sum is missing from it."
        return f"Rank {self.rank}'s part is in the sum {self.factor:.6g} times, and every other rank's once."


def sampled_elements(numel: int) -> tuple[int, ...]:
    """Flat elements that every rank looks at, spread over a tensor of `numel`."""
    if numel <= _NUM_SAMPLES:
        return tuple(range(numel))
    # An odd step: rows of a matrix are not always hit at the same column.
    step = numel // _NUM_SAMPLES | 1
    return tuple(sorted({place * step % numel for place in range(_NUM_SAMPLES)}))


def find_source(ranks: Mapping[int, GradientSamples]) -> Source | None:
    """The one rank whose part of a wrong gradient explains its error, if there is one.

    Args:
        ranks: what every rank knows of the same parameter and step.
    """
    summed = {place: value for samples in ranks.values() for place, value in samples.summed.items()}
    expected = {place: value for samples in ranks.values() for place, value in samples.expected.items()}
    places = sorted(summed)
    error = [summed[place] - expected[place] for place in places]
    if len(ranks) < 2 or not any(error) or not all(map(math.isfinite, error)):
        return None
    parts = {rank: [samples.part.get(place, 0.0) for place in places] for rank, samples in ranks.items()}
    fits = {rank: fit for rank, part in parts.items() if (fit := _fit(error, part)) is not None}
    if len(fits) != 1:
        return None
    ((rank, share),) = fits.items()
    total = [sum(part[place] for part in parts.values()) for place in range(len(places))]
    # Parts that add up to the sum were scaled before: what is seen of them is s times what they should be.
    came_scaled = _is_small([a - summed[place] for a, place in zip(total, places, strict=True)], error)
    if came_scaled:
        return Source(rank, 1 / (1 - share)) if share != 1 else None
    return Source(rank, 1 + share)


def _fit(error: Sequence[float], part: Sequence[float]) -> float | None:
    """The number by which `part` gives `error`, or None where none does."""
    square = math.fsum(value * value for value in part)
    if not square:
        return None
    share = math.fsum(a * b for a, b in zip(error, part, strict=True)) / square
    rest = [a - share * b for a, b in zip(error, part, strict=True)]
    return share if _is_small(rest, error) else None


def _is_small(values: Sequence[float], error: Sequence[float]) -> bool:
    return math.hypot(*values) <= _RESIDUAL * math.hypot(*error)
