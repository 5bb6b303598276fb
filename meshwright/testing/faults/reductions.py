"""Silent faults of gradient reductions: missing, doubled, over the wrong ranks, scaled, too early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshwright.testing.faults.silent import SilentFault, Site, patch
from meshwright.verification.candidate import CandidateRank


def _no_gradient_reduction(candidate: CandidateRank, _site: Site) -> None:
    engine = candidate.engine
    whole = engine.group
    nobody = replace(whole, transport=None)

    def make(reduce: Callable[..., Any]) -> Callable[..., Any]:
        def alone(memory: Any) -> None:
            engine.group = nobody
            reduce(memory)
            engine.group = whole

        return alone

    patch(engine, "_reduce", make)


FAULTS = (
    SilentFault(
        name="no_gradient_reduction",
        theme="missing reduction",
        description="no rank reduces its gradients: each trains on its own samples, and replicas drift from step 1",
        source="volcengine/verl#7493",
        expected=("gradients",),
        inject=_no_gradient_reduction,
        needs=("2 ranks", "ddp"),
    ),
)
