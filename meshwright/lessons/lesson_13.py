"""Break it, find it: faults that raise nothing, and the first wrong tensor that `verify` names.

Most bugs of parallel training are silent: ranks run, the loss falls, and one device would have made another model. Here
ranks commit faults of the shipped registry. First no gradient is reduced, and what becomes of the replicas is
plotted; then come faults of your choice: `meshwright learn 13 NAME NAME`. `docs/verify.md` says how to read a failure.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.launching.verify import verify
from meshwright.lessons.parity import sample, small_gpt
from meshwright.lessons.pictures import log_bars
from meshwright.models import language_model_loss
from meshwright.testing.faults.registry import SILENT, Injection
from meshwright.verification.rank import CandidateRank
from meshwright.verification.result import VerifyResult

FIRST, CHOSEN, NUM_STEPS, NUM_SAMPLES = "no_gradient_reduction", ("mean_of_means", "moments_swapped"), 6, 100
# The policy that a fault needs, by what it says it needs; all others happen under plain data parallelism, 0.
ZERO = {"optimizer shards": 1, "gathered updates": 1, "gradient shards": 2, "weight shards": 3}


@dataclass(frozen=True)
class Watched:
    """Commits a fault, or none, and leaves this rank's weights in a folder after every step."""

    fault: Injection | None
    folder: str

    def __call__(self, candidate: CandidateRank) -> None:
        """Do it on this rank."""
        if self.fault is not None:
            self.fault(candidate)
        update, weights = candidate.state.optimizer.step, candidate.engine.model.parameters

        def step(**options: Any) -> None:
            update(**options)
            file = Path(self.folder) / f"{candidate.state.step} {candidate.rank}"
            torch.save(nn.utils.parameters_to_vector(weights()).detach(), file)

        vars(candidate.state.optimizer)["step"] = step


def main(*names: str) -> None:
    """Run the lesson; `names` are faults of the registry."""
    chosen = [Injection(name, steps=NUM_STEPS) for name in names or CHOSEN]
    print(f"1. {describe(FIRST)}\n")
    apart, result = drift(Injection(FIRST, steps=NUM_STEPS))
    show(result)
    for number, injection in enumerate(chosen, 2):
        needs = SILENT[injection.name].needs
        print(f"\n{number}. {describe(injection.name)}\n")
        zero = max((ZERO.get(need, 0) for need in needs), default=0)
        show(compare(injection, zero=zero, processes=3 if "3 ranks" in needs else 2))
    print(f"\n  Known faults: {', '.join(SILENT)}")
    print(f"\n{len(chosen) + 2}. {FIRST} again: largest difference of one weight between ranks 0 and 1.\n")
    print(log_bars({f"step {step}": distance for step, distance in enumerate(apart, 1)}))
    together, result = drift(None)
    print("\n  Adam's first step moves a weight by the learning rate, 3e-04: in two directions, 6e-04 apart.")
    print(f"  Without the fault: {together}, and one device computes the same:\n\n{result.table()}")
    assert result.ok, "a fault was seen where there is none"
    assert min(apart) > 0 == max(together), "replicas drift with the fault, and only with it"


def describe(name: str) -> str:
    """A fault, and its source."""
    return f"{name}: {SILENT[name].description} ({SILENT[name].source})."


def show(result: VerifyResult) -> None:
    """What `verify` says of a fault: checks that passed in one line, the others, and the first in execution order."""
    assert not result.ok, "a fault went unseen"
    passed = " ".join(check.name for check in result.checks if check.ok)
    failed = [check.line() for check in result.checks if not check.ok]
    print("\n".join([f"  ✓ {passed}", *failed, *(f"  {line}" for line in result.finding())]))


def compare(inject: Any, *, zero: int = 0, processes: int = 2) -> VerifyResult:
    """A small GPT on ranks, with what `inject` does to them, against one device."""
    data, plan = [sample(index) for index in range(NUM_SAMPLES)], f"zero={zero},bucket_bytes=4096 bytes"
    options: Any = {"plan": plan, "processes": processes, "steps": NUM_STEPS, "inject": inject}
    return verify(small_gpt, language_model_loss, data, **options)


def drift(fault: Injection | None) -> tuple[list[float], VerifyResult]:
    """How far the weights of two ranks are apart after each step, and what `verify` says."""
    with tempfile.TemporaryDirectory() as folder:
        result = compare(Watched(fault, folder))
        steps = [
            [torch.load(Path(folder) / f"{step} {rank}") for rank in (0, 1)] for step in range(NUM_STEPS)
        ]
    return [float((first - second).abs().max()) for first, second in steps], result
