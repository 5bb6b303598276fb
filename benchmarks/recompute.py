"""What recomputation costs in time and saves in memory: every policy on one process, in one race.

With measured f (forward), b (backward) and o (optimizer) of a plain step, full recomputation may cost 1.03 times
1 + f/(f+b+o). `blocks` is the same bound with the forward of the blocks alone: head and loss do not run again.

    python benchmarks/recompute.py [a b] [--rounds 15] [--inner 2] [--json FILE]
    python benchmarks/recompute.py --tiny               a smoke run of seconds
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data_parallel import HYPER
from harness import WORKLOADS, Timing, Workload, launch, race

from meshwright.layout.recompute import parse_recompute
from meshwright.models import GPTConfig, language_model_loss
from meshwright.recompute.install import install
from meshwright.recompute.live_bytes import LiveBytes

WORDS = ("none", "selective", "full", "every:2", "every:5", "constant")
PARTS = ("forward", "forward of blocks", "forward, backward")
BAR = 1.03
TINY = Workload(
    "tiny",
    "GPT 4 x 32, 2 x 16 tokens",
    2,
    16,
    GPTConfig(num_layers=4, dim=32, num_heads=2, ffn_dim=128, vocab_size=64, max_seq_len=16),
)


class Candidate:
    """One model, its optimizer and its policy."""

    def __init__(self, workload: Workload, word: str) -> None:
        self.model, self.batch = workload.model(), workload.batch(0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **HYPER)
        install(self.model, parse_recompute(word))
        with torch.no_grad():
            self.stream: torch.Tensor = self.model.token_embedding(self.batch["tokens"])

    def forward(self) -> torch.Tensor:
        total, count = language_model_loss(self.model, self.batch)
        return total / count

    def blocks(self) -> float:
        x = self.stream.requires_grad_()
        for block in self.model.blocks:
            x = block(x)
        return 0.0

    def backward(self) -> float:
        loss = self.forward()
        loss.backward()
        return float(loss.detach())

    def step(self) -> float:
        loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss

    def peak_bytes(self) -> int:
        """Of what a step makes, gradients left out."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        with LiveBytes([*self.model.parameters(), *gradients, *self.batch.values()]) as meter:
            self.backward()
        self.optimizer.zero_grad(set_to_none=False)
        return meter.peak


def compare(_rank: int, _world_size: int, name: str, rounds: int, inner: int) -> dict[str, Any]:
    workload = TINY if name == "tiny" else WORKLOADS[name]
    candidates = {word: Candidate(workload, word) for word in WORDS}
    losses = {word: [c.step() for _ in range(2)][-1] for word, c in candidates.items()}
    peaks = {word: c.peak_bytes() for word, c in candidates.items()}
    plain = Candidate(workload, "none")
    plain.step()
    steps: dict[str, Callable[[], float]] = {word: c.step for word, c in candidates.items()}
    parts = (lambda: float(plain.forward().detach()), plain.blocks, plain.backward)
    timings = race({**steps, **dict(zip(PARTS, parts, strict=True))}, rounds=rounds, inner=inner)
    return {
        "workload": workload.about,
        "milliseconds": {key: timing.median for key, timing in timings.items()},
        "cpu_milliseconds": {key: statistics.median(timing.cpu) for key, timing in timings.items()},
        "peak_bytes": peaks,
        "loss_after_2": losses,
        **_bounds(timings),
    }


def _bounds(timings: dict[str, Timing]) -> dict[str, float]:
    """Ratios of the same round, then medians: what slows one slows the others."""

    def ratio(key: str, base: str) -> float:
        pairs = zip(timings[key].cpu, timings[base].cpu, strict=True)
        return statistics.median(a / b for a, b in pairs)

    cost, forward, blocks = ratio("full", "none"), ratio(PARTS[0], "none"), ratio(PARTS[1], "none")
    return {
        "full_over_none": cost,
        "full_over_bound": cost / (1 + forward),
        "full_over_blocks": cost / (1 + blocks),
    }


def report(result: dict[str, Any]) -> str:
    """For people."""
    lines = [result["workload"]]
    for key, milliseconds in result["milliseconds"].items():
        peak, loss = result["peak_bytes"].get(key), result["loss_after_2"].get(key)
        kept = "" if peak is None else f"   peak {peak / 2**20:8.1f} MiB   loss {loss:.9f}"
        lines.append(
            f"  {key:18} {milliseconds:9.2f} ms   CPU {result['cpu_milliseconds'][key]:9.2f} ms{kept}"
        )
    lines.append(
        f"  full / none {result['full_over_none']:.4f} CPU; over 1 + f/(f+b+o): {result['full_over_bound']:.4f} "
        f"(bar {BAR}), over the same of the blocks alone: {result['full_over_blocks']:.4f}"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["a"])
    parser.add_argument("--tiny", action="store_true", help="a smoke run")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--inner", type=int, default=2)
    parser.add_argument("--json", type=Path, help="a file for all figures")
    given = parser.parse_args()
    results = []
    for name in ["tiny"] if given.tiny else given.workloads:
        results.append(launch(compare, 1, name, given.rounds, given.inner, pin=True))
        print(report(results[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
