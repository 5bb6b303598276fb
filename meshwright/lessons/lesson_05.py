"""ZeRO-1, 2, 3 (FSDP): the same data parallelism, with the copies split over the ranks.

Data-parallel ranks all hold the same weights, gradients and moments. ZeRO leaves each rank 1/P of the moments
(stage 1), of the gradients too (stage 2), of the weights too (stage 3 = FSDP), and fetches the rest when it is
needed. Bytes a rank holds and sends follow from n parameters, P ranks and A micro-batches; zero3 works by units: the
blocks, and a root with all else, which stays gathered from forward to backward.
Simplification: activations are those of plain data parallelism, and are not counted here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import torch

from meshwright.layout.accounting import declared_calls, declared_wire_bytes, memory_bytes, optimizer_bytes
from meshwright.layout.bucket import Unit
from meshwright.layout.policy import POLICY_NAMES, ShardingPolicy, find_policy
from meshwright.lessons.parity import check_parity
from meshwright.lessons.pictures import stacked_bytes
from meshwright.lessons.stepping import accumulate_gradients
from meshwright.models import build_model, language_model_loss
from meshwright.presets import find_model, num_parameters
from meshwright.sharding.engine import ShardingEngine
from meshwright.sharding.units import plan_units
from meshwright.testing.ranks import RankPool
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer

PRESET, WORLDS, A, MIB = find_model("gpt-nano"), (1, 2, 4), 2, 2**20
MEMORY = {"ddp": "16n", "zero1": "8n + 8n/P", "zero2": "4n + 12n/P", "zero3": "16n/P"}
WIRE = {"ddp": "2·w", "zero1": "2·w", "zero2": "(A+1)·w", "zero3": "A·(3·w - root)"}


def main() -> None:
    """Run the lesson."""
    pool, largest = RankPool(), WORLDS[-1]
    runs = {(name, p): pool.run(one_step, p, name)[0] for name in POLICY_NAMES for p in WORLDS}
    print(f"1. MiB a rank between steps, fp32, Adam, n = {num_parameters(PRESET):,}: predicted / measured\n")
    print(f"  {'policy':<9}{'bytes':<13}" + "   ".join(f"P = {p:<9}" for p in WORLDS).rstrip())
    for name in POLICY_NAMES:
        cells = [(predict_bytes(name, p), runs[name, p][0]) for p in WORLDS]
        assert all(predicted == measured for predicted, measured in cells), f"{name}: {cells}"
        totals = [tuple(sum(parts.values()) / MIB for parts in cell) for cell in cells]
        print(f"  {name:<9}{MEMORY[name]:<13}" + "   ".join(f"{a:5.2f} / {b:5.2f}" for a, b in totals))
    print("\n  Both exceed the formula by padding, and zero2 and zero3 by buffers (b) for the next backward,")
    print(f"  which do not grow with depth. P = {largest}:  w weights  g gradients  m moments  b buffers\n")
    print(stacked_bytes({name: runs[name, largest][0] for name in POLICY_NAMES}))

    print(
        f"\n2. Sent by a rank in a step, P = {largest}, A = {A}, w = (P-1)/P·4n bytes; declared = issued:\n"
    )
    for name in POLICY_NAMES:
        _, calls, sent = runs[name, largest]
        policy, units = policy_and_units(name, largest)
        assert calls == declared_calls(policy, units, num_microbatches=A), f"{name} issued {calls}"
        assert sent == declared_wire_bytes(policy, units, num_microbatches=A), f"{name} sent {sent}"
        listed = "  ".join(f"{count} {op.replace('_', '-')}" for op, count in sorted(calls.items()))
        print(f"  {name:<9}{WIRE[name]:<16}{sent / MIB:6.2f} MiB   {listed}")

    print("\n3. The law: each of them gives the result of one process.\n")
    for name in POLICY_NAMES:
        print(check_parity(pool, name, num_ranks=largest, num_microbatches=A).line())
    pool.close()


def policy_and_units(name: str, num_ranks: int) -> tuple[ShardingPolicy, tuple[Unit, ...]]:
    """The policy with buckets of 1 MiB, and how it groups the model's parameters."""
    policy = find_policy(name, bucket_bytes=MIB)
    return policy, plan_units(build_model(PRESET.family, asdict(PRESET)), policy, num_ranks)


def predict_bytes(name: str, num_ranks: int) -> dict[str, int]:
    """Bytes that rank 0 keeps between steps."""
    policy, units = policy_and_units(name, num_ranks)
    moments = optimizer_bytes(policy, units, optimizer="adamw")
    return _parts(asdict(memory_bytes(policy, units)), moments)


def one_step(mesh: Any, name: str) -> tuple[dict[str, int], Counter[str], int]:
    """One step on this rank: bytes it keeps, collectives it issued, bytes it sent for them."""
    model = build_model(PRESET.family, asdict(PRESET))
    group, policy = mesh.group("dp"), find_policy(name, bucket_bytes=MIB)
    engine = ShardingEngine(model, policy=policy, groups=mesh.data_groups(), device=torch.device("cpu"))
    optimizer = ShardedOptimizer(OptimizerSpec(), engine.shards)
    batch = dict.fromkeys(("tokens", "labels"), torch.randint(PRESET.vocab_size, (2, 32)))
    accumulate_gradients(engine, lambda _: language_model_loss(model, batch)[0], num_microbatches=A)
    optimizer.step(lr=1e-3, used=set(engine.parameter_names))
    engine.finish_step()
    calls = Counter({op: count for (op, _), count in mesh.log.calls.items()})
    moved = sum(nbytes * (2 if op == "all_reduce" else 1) for (op, _), nbytes in mesh.log.bytes.items())
    sent = moved * (group.size - 1) // group.size
    return _parts(engine.storage_bytes(), optimizer.state_bytes()), calls, sent


def _parts(held: dict[str, int], moments: int) -> dict[str, int]:
    weights, gradients = (held[key] + held[f"{key[:-1]}_shards"] for key in ("weights", "gradients"))
    return {"weights": weights, "gradients": gradients, "moments": moments, "buffers": held["pool"]}
