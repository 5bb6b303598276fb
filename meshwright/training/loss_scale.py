"""The loss scale of fp16: a power of two that keeps small gradients above what fp16 can hold, and follows overflows.

Owns the rule by which it moves. The value is a function of what all ranks agree on (whether the step's norm is finite),
so it is the same everywhere without a message of its own. A skipped step leaves weights and optimizer as they are and
still uses up its samples and its place in the learning-rate schedule: both are functions of the step number.

Source: Micikevicius et al. 2018, "Mixed precision training" (arXiv 1710.03740), section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.errors import NumericsError

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
# The scale after that many halvings would be 1: what still overflows then is no matter of scale.
MAX_SKIPS_IN_ROW = 16
_LARGEST = 2.0**24
_PREFIX = "loss_scale_"
_SAVED = ("value", "steps_since_change", "skipped", "skipped_in_row")


@dataclass(frozen=True)
class LossScale:
    """The scale of one step, and what it remembers.

    Attributes:
        value: what the loss is multiplied by before backward; a power of two, so that dividing it out is exact.
        steps_since_change: finite steps since it last moved.
        skipped: steps left out since the start of the run.
        skipped_in_row: newest steps left out one after the other.
        growth_interval: finite steps after which it doubles.
    """

    value: float = INITIAL_SCALE
    steps_since_change: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    growth_interval: int = GROWTH_INTERVAL

    def after(self, *, overflowed: bool) -> LossScale:
        """The scale of the next step: halved after an overflow, doubled after `growth_interval` finite steps."""
        if overflowed:
            return replace(
                self,
                value=self.value / 2,
                steps_since_change=0,
                skipped=self.skipped + 1,
                skipped_in_row=self.skipped_in_row + 1,
            )
        steps = self.steps_since_change + 1
        if steps < self.growth_interval or self.value >= _LARGEST:
            return replace(self, steps_since_change=steps, skipped_in_row=0)
        return replace(self, value=self.value * 2, steps_since_change=0, skipped_in_row=0)

    def to_numbers(self) -> dict[str, float]:
        """What a checkpoint holds, by names with the prefix `loss_scale_`."""
        return {f"{_PREFIX}{name}": float(getattr(self, name)) for name in _SAVED}

    def with_numbers(self, numbers: Mapping[str, float]) -> LossScale:
        """The scale as `to_numbers` saved it; itself where a checkpoint of another precision has none."""
        if f"{_PREFIX}value" not in numbers:
            return self
        counts = {name: int(numbers[f"{_PREFIX}{name}"]) for name in _SAVED[1:]}
        return replace(self, value=numbers[f"{_PREFIX}value"], **counts)

    def check(self, step: int) -> None:
        """Raise E603 when step `step` is the last of too many skipped in a row."""
        if self.skipped_in_row < MAX_SKIPS_IN_ROW:
            return
        raise NumericsError(
            "E603",
            f"{self.skipped_in_row} steps in a row were skipped up to step {step}: their fp16 gradients overflow even "
            f'with a loss scale of {self.value:g}. Set plan.precision = "bf16", which has the range of fp32, or lower '
            f"train.optimizer.lr.",
        )
