"""Learning rate as a pure function of the step: constant, warm-up + cosine, warm-up-stable-decay."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRate:
    """A schedule, as numbers.

    Attributes:
        name: `constant`, `cosine` or `wsd`; each starts with the warm-up.
        peak: rate after the warm-up.
        warmup_steps: linear from peak/warmup_steps to the peak.
        decay_steps: last part of a `wsd` run, linear to the end value.
        total_steps: length of the run; `constant` needs none.
        final_ratio: rate at the end as a fraction of the peak (`cosine`, `wsd`).
    """

    name: str
    peak: float
    warmup_steps: int = 0
    decay_steps: int = 0
    total_steps: int | None = None
    final_ratio: float = 0.1

    def at(self, step: int) -> float:
        """Rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.name == "constant":
            return self.peak
        assert self.total_steps is not None, f"schedule {self.name} needs the length of the run"
        return self.peak * (self.final_ratio + (1 - self.final_ratio) * self._height(step))

    def _height(self, step: int) -> float:
        """1 at the peak, 0 at the last step."""
        assert self.total_steps is not None
        last = self.total_steps - 1
        if self.name == "cosine":
            span = max(last - self.warmup_steps, 1)
            return 0.5 * (1 + math.cos(math.pi * min((step - self.warmup_steps) / span, 1.0)))
        start = last - self.decay_steps
        return 1.0 if step <= start else max(last - step, 0) / max(self.decay_steps, 1)
