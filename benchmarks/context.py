"""Attention over a cut sequence on 2 ranks of one thread against one process: forward and backward, causal.

One process and all kinds run in the same processes in turn, over Gloo and shared memory, zigzag and consecutive order;
`limit` computes what zigzag ring attention computes and sends nothing. Bars: 1.55 x one process over Gloo, 1.65 x with
shared memory.

    python benchmarks/context.py [2048 8192] [--rounds N] [--inner N] [--json FILE]      3 minutes on 2 cores
    python benchmarks/context.py --tiny                 a smoke run of seconds
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from harness import launch, race
from torch import Tensor
from torch.nn import functional as F

from meshwright.comm.log import CommLog
from meshwright.comm.mesh import Mesh, World
from meshwright.comm.ops import Group
from meshwright.context.attend import attend
from meshwright.context.blocks import Attention, positions_of
from meshwright.context.masks import AttentionMask
from meshwright.layout.sequence import CpKind, SequenceCut, cut_sequence
from meshwright.mesh import MeshSpec

BATCH, HEADS, WIDTH, RANKS = 1, 8, 64, 2
KINDS: tuple[tuple[CpKind, bool], ...] = (
    ("ring", True),
    ("ring", False),
    ("allgather", True),
    ("ulysses", False),
)
LONG = 8192
BARS = {"gloo": 1.55, "shm": 1.65}
SINGLE, LIMIT = "one process", "limit: ring zigzag, nothing sent"


def whole_tensors(length: int) -> list[Tensor]:
    """Query, key, value and the output's gradient."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, HEADS, length, WIDTH, generator=generator) for _ in range(4)]


class Candidate:
    """Attention of this rank's part, forward and backward."""

    def __init__(self, length: int, kind: CpKind, group: Group, *, zigzag: bool) -> None:
        self.cut: SequenceCut = cut_sequence(length, group.size, kind, zigzag=zigzag)
        self.kind, self.group = kind, group
        here = positions_of(self.cut.runs(group.index), torch.device("cpu"))
        *leaves, self.grad = (x[:, :, here].contiguous() for x in whole_tensors(length))
        self.leaves = [leaf.requires_grad_() for leaf in leaves]
        self.call = Attention(AttentionMask(is_causal=True), length, WIDTH**-0.5)

    def step(self) -> float:
        for leaf in self.leaves:
            leaf.grad = None
        out = attend(*self.leaves, call=self.call, cut=self.cut, group=self.group, kind=self.kind)
        out.backward(self.grad)
        return 0.0

    def error(self, expected: list[Tensor]) -> float:
        """Of the gradients, largest, after a step."""
        self.step()
        here = positions_of(self.cut.runs(self.group.index), torch.device("cpu"))
        return max(
            float((x.grad - y[:, :, here]).abs().max()) for x, y in zip(self.leaves, expected, strict=True)
        )


class _Silent:
    """Transport of a group that sends nothing: what arrives is what memory happens to hold."""

    name = "none"

    def send(self, *_: Any) -> _Silent:
        return self

    receive = send

    def wait(self) -> None:
        pass


def single(length: int) -> tuple[Callable[[], float], list[Tensor]]:
    """torch's fused attention of the whole sequence, and its gradients."""
    *leaves, grad = whole_tensors(length)
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def step() -> float:
        for leaf in leaves:
            leaf.grad = None
        F.scaled_dot_product_attention(*leaves, is_causal=True).backward(grad)
        return 0.0

    step()
    return step, [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]


def compare(rank: int, world_size: int, length: int, rounds: int, inner: int) -> dict[str, Any]:
    step, expected = single(length)
    steps, errors = {SINGLE: step}, {}
    with ExitStack() as stack:
        for transport in BARS:
            mesh = Mesh(
                MeshSpec.of(cp=world_size),
                World(rank=rank, size=world_size, local_rank=rank, local_size=world_size),
                log=CommLog(rank, world_size),
                device=torch.device("cpu"),
                axis_sets={"cp": ("cp",)},
                transport=transport,  # type: ignore[arg-type]
            )
            stack.enter_context(closing(mesh))
            group = mesh.group("cp")
            for kind, zigzag in KINDS:
                order = "zigzag" if zigzag else "consecutive"
                candidate = Candidate(length, kind, group, zigzag=zigzag)
                name = f"{kind} {order}, {transport}"
                errors[name] = candidate.error(expected)
                steps[name] = candidate.step
        silent = Group("cp", group.ranks, group.index, _Silent(), CommLog())  # type: ignore[arg-type]
        steps[LIMIT] = Candidate(length, "ring", silent, zigzag=True).step
        timings = race(steps, rounds=rounds, inner=inner, warmup=1)
    return {
        "length": length,
        "milliseconds": {name: timing.median for name, timing in timings.items()},
        "cpu_milliseconds": {name: statistics.median(timing.cpu) for name, timing in timings.items()},
        "speed_up": {
            name: statistics.median(a / b for a, b in zip(timings[SINGLE].wall, timing.wall, strict=True))
            for name, timing in timings.items()
        },
        "loopback_megabytes": {name: statistics.median(timing.loopback) for name, timing in timings.items()},
        "largest_error": errors,
    }


def report(result: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"S = {result['length']}, causal, forward and backward, batch {BATCH}, {HEADS} heads of {WIDTH}, {RANKS} ranks"
    ]
    for name, milliseconds in result["milliseconds"].items():
        bar = BARS.get(name.rpartition(", ")[2]) if "ring zigzag" in name else None
        told = f"   bar {bar}" if bar else ""
        error = result["largest_error"].get(name)
        lines.append(
            f"  {name:34} {milliseconds:9.2f} ms   CPU {result['cpu_milliseconds'][name]:9.2f} ms   "
            f"{result['speed_up'][name]:.2f} x{told}" + ("" if error is None else f"   error {error:.1e}")
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("lengths", nargs="*", type=int, default=[2048, 8192])
    parser.add_argument("--tiny", action="store_true", help="a smoke run")
    parser.add_argument("--rounds", type=int, help="by default 7, 3 for sequences of 8192 and more")
    parser.add_argument(
        "--inner", type=int, help="steps a timing; by default 2, 1 for sequences of 8192 and more"
    )
    parser.add_argument("--json", type=Path, help="a file for all figures")
    given = parser.parse_args()
    results = []
    for length in [64] if given.tiny else given.lengths:
        rounds, inner = (
            given.rounds or (7 if length < LONG else 3),
            given.inner or (2 if length < LONG else 1),
        )
        results.append(launch(compare, RANKS, length, rounds, inner, pin=True))
        print(report(results[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
