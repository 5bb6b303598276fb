"""How long a save stops training: in the background against in the foreground, per rank.

    python benchmarks/checkpoint.py                     98 M parameters, 2 ranks, zero1: about 1.2 GB a save
    python benchmarks/checkpoint.py --tiny              a smoke run of seconds

Both ways run in the same processes, in turn (A B A B ...), on real training steps of a GPT, and each save is followed
by some steps, so that a thread that writes competes with training as it does in a run. Printed: the stall
(what training waits), the whole save, steps with and without a save under way, and bytes a second. `--out` writes JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.manifest import RunFacts
from meshwright.checkpoint.writer import Place, Writer
from meshwright.comm import ops
from meshwright.layout.policy import find_policy
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.models.initial import initialise
from meshwright.sharding.engine import ShardingEngine
from meshwright.testing.ranks import RankPool
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.saving import expected_tensors, items_to_save
from meshwright.training.state import TrainState
from meshwright.training.step import train_step

SIZES = {
    # 98 M: the width and depth of GPT-2 small with a short vocabulary and short sequences, for a CPU.
    "98m": {
        "vocab_size": 16_384,
        "max_seq_len": 64,
        "dim": 768,
        "num_layers": 12,
        "num_heads": 12,
        "ffn_dim": 3072,
    },
    "tiny": {
        "vocab_size": 512,
        "max_seq_len": 32,
        "dim": 128,
        "num_layers": 2,
        "num_heads": 4,
        "ffn_dim": 512,
    },
}


def make_state(mesh: Any, size: str, policy: str) -> TrainState:
    model = GPT(GPTConfig(**SIZES[size], tied_embedding=True))
    initialise(model, 0)
    engine = ShardingEngine(
        model, policy=find_policy(policy), groups=mesh.data_groups(), device=torch.device("cpu")
    )
    return TrainState(engine, ShardedOptimizer(OptimizerSpec("adamw"), engine.shards))


def step(state: TrainState, size: str) -> float:
    """Seconds of one training step of one sequence a rank."""
    length = SIZES[size]["max_seq_len"]
    tokens = torch.arange(length).remainder(SIZES[size]["vocab_size"]).view(1, -1)
    start = time.perf_counter()
    train_step(
        state,
        lambda _k: {"tokens": tokens, "labels": tokens},
        loss=language_model_loss,
        num_microbatches=1,
        lr=1e-4,
        clip_norm=1.0,
    )
    return time.perf_counter() - start


def measure(mesh: Any, size: str, policy: str, root: Path, saves: int, steps: int) -> dict[str, Any]:
    """One rank: save in turn in the background and in the foreground, with `steps` training steps after each."""
    state = make_state(mesh, size, policy)
    step(state, size)  # warms up, and makes the optimizer's state
    quiet = [step(state, size) for _ in range(steps)]
    group = state.engine.group
    rows: dict[str, dict[str, list[float]]] = {}
    writers = {}
    for name in ("background", "foreground"):
        place = Place(root / name, group.index, group.size, "bench", keep=1)
        writers[name] = Writer(place, name == "background", expected_tensors(state.engine))
        rows[name] = {"stall": [], "seconds": [], "steps_after": []}
    for _ in range(saves):
        for name, writer in writers.items():
            ops.barrier(group, cause="start together")
            writer.save(items_to_save(state), RunFacts(state.step))
            rows[name]["stall"].append(writer.stall_seconds)
            rows[name]["steps_after"] += [step(state, size) for _ in range(steps)]
            report = writer.finish()
            assert report is not None
            rows[name]["seconds"].append(report.seconds)
    nbytes = sum(item.values.numel() * item.values.element_size() for item in items_to_save(state))
    return {"rows": rows, "quiet": quiet, "nbytes": nbytes}


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over saves; of each save the slowest rank counts, and the first one of each kind is shown apart."""

    def slowest(name: str, key: str) -> list[float]:
        return [max(values) for values in zip(*(rank["rows"][name][key] for rank in ranks), strict=True)]

    result: dict[str, Any] = {
        "bytes_a_rank": [rank["nbytes"] for rank in ranks],
        "quiet_step_seconds": statistics.median(ranks[0]["quiet"]),
    }
    for name in ("background", "foreground"):
        stalls = slowest(name, "stall")
        result[name] = {
            "first_stall_seconds": stalls[0],
            "stall_seconds": statistics.median(stalls[1:] or stalls),
            "save_seconds": statistics.median(slowest(name, "seconds")),
            "step_seconds_after": statistics.median(slowest(name, "steps_after")),
        }
    background, foreground = result["background"]["stall_seconds"], result["foreground"]["stall_seconds"]
    result["stall_ratio"] = background / foreground
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a smoke run")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--policy", default="zero1")
    parser.add_argument("--saves", type=int, default=5, help="of each kind")
    parser.add_argument("--steps", type=int, default=3, help="after each save")
    parser.add_argument("--folder", type=Path, help="where to save; default: the temporary folder")
    parser.add_argument("--out", type=Path, help="a JSON file")
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="meshwright-checkpoint-", dir=given.folder))
    pool = RankPool()
    size = "tiny" if given.tiny else "98m"
    arguments = (size, given.policy, root, given.saves, given.steps)
    try:
        result = summary(pool.run(measure, given.ranks, *arguments, timeout=3600.0))
    finally:
        pool.close()
        shutil.rmtree(root, ignore_errors=True)
    result |= {"size": size, "ranks": given.ranks, "policy": given.policy, "machine": platform.processor()}
    total = sum(result["bytes_a_rank"])
    print(f"{size}, {given.policy} on {given.ranks} ranks, {total / 2**20:,.0f} MiB a save")
    print(f"a step without saves {result['quiet_step_seconds']:.3f} s")
    for name in ("background", "foreground"):
        row = result[name]
        print(
            f"{name:<11} stall {row['stall_seconds']:.3f} s (first {row['first_stall_seconds']:.3f})   whole save "
            f"{row['save_seconds']:.3f} s = {total / row['save_seconds'] / 2**20:,.0f} MiB/s   a step after it "
            f"{row['step_seconds_after']:.3f} s"
        )
    print(f"stall in the background / in the foreground: {result['stall_ratio']:.1%}")
    if given.out:
        given.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
