"""Data parallel: every rank holds the whole model, and gradients are summed while the backward still runs.

Each rank computes the gradient of its own samples. Summed over ranks and divided once by the global count, it is the
gradient of the whole batch, so all ranks take the same step. The sum travels in buckets, in reverse order of use:
the last layers' gradients are ready first, and their bucket is on the wire before the first layers' are computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm import ops
from meshwright.layout.accounting import declared_calls, declared_wire_bytes
from meshwright.layout.policy import find_policy
from meshwright.lessons.parity import check_parity
from meshwright.lessons.pictures import bars
from meshwright.lessons.stepping import accumulate_gradients
from meshwright.sharding.engine import ShardingEngine
from meshwright.sharding.units import plan_units
from meshwright.testing.ranks import RankPool

NUM_RANKS, NUM_STEPS, WIDTH, LR = 4, 5, 16, 1.0
DDP = find_policy("ddp", bucket_bytes=2 * WIDTH * WIDTH * 4)  # two matrices of four bytes an element


def main() -> None:
    """Run the lesson."""
    pool = RankPool()
    print(f"1. {NUM_RANKS} ranks, one start, different samples: distance of the weights of ranks 0 and 1.\n")
    apart, together = (pool.run(train_by_hand, NUM_RANKS, reduce)[0] for reduce in (False, True))
    print(bars({f"step {step}": distance for step, distance in enumerate(apart, 1)}, digits=4))
    print(f"  The replicas drift apart. With one all-reduce of the gradients: {together}\n")
    assert min(apart) > 0 == max(together)
    units = plan_units(chain(), DDP, NUM_RANKS)
    members = [f"{b.name} = {{{', '.join(p.name[0] for p in b.parameters)}}}" for b in units[0].buckets]
    print(f"2. Four matrices, 0..3 in order of use: {', '.join(members)}. One backward on rank 0:\n")
    events, _ = pool.run(one_step, NUM_RANKS, 1)[0]
    print("  " + " → ".join(events))
    assert events.index("reduce bucket 0") < events.index("gradient 1"), "bucket 0 waited"
    print("  Bucket 0 is on the wire before gradients 1 and 0 exist: computing hides sending.\n")
    print("3. Accumulation: A micro-batches are summed on the rank, the wire sees one reduction a step.\n")
    for a in (1, 3):
        issued = pool.run(one_step, NUM_RANKS, a)[0][1]
        declared = declared_calls(DDP, units, num_microbatches=a)["all_reduce"]
        sent = declared_wire_bytes(DDP, units, num_microbatches=a)
        print(f"  A = {a}: {declared} all-reduces declared, {issued} issued; 2·(P-1)/P·4n = {sent:,} bytes")
        assert declared == issued
    print("\n4. The law: the result is that of one process.\n")
    print(check_parity(pool, "ddp", num_ranks=NUM_RANKS, num_microbatches=3).line())
    pool.close()


def chain() -> nn.Sequential:
    """Four square matrices, used in order."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


def samples(rank: int, step: int) -> Tensor:
    """This rank's part of the batch of `step`, (8, WIDTH)."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def train_by_hand(mesh: Any, reduce: bool) -> list[float]:
    """Plain gradient descent; distance between the weights of ranks 0 and 1 after each step."""
    model, group, distances = chain(), mesh.group("dp"), []
    for step in range(NUM_STEPS):
        x = samples(mesh.rank, step)
        gradients = torch.autograd.grad((model(x) - x).square().mean(), list(model.parameters()))
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / NUM_RANKS
        if reduce:
            ops.all_reduce(flat, group, cause="gradients").wait()
        mine = nn.utils.parameters_to_vector(model.parameters()).detach() - LR * flat
        nn.utils.vector_to_parameters(mine, model.parameters())
        everyone = torch.empty(group.size, mine.numel())
        ops.all_gather(everyone.flatten(), mine, group, cause="weights").wait()
        distances.append(float((everyone[0] - everyone[1]).norm()))
    return distances


def one_step(mesh: Any, num_microbatches: int) -> tuple[list[str], int]:
    """Gradients of one step: the order of gradients and reductions, and how many reductions were issued."""
    model, log, events = chain(), mesh.log, list[str]()

    def note(text: str) -> None:
        events.extend(event.cause for event in log.events() if event.cause not in events)
        events.append(text)

    for number, parameter in enumerate(model.parameters()):  # these hooks run before the engine's own
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: note(f"gradient {number}"))
    engine = ShardingEngine(model, policy=DDP, groups=mesh.data_groups(), device=torch.device("cpu"))
    accumulate_gradients(
        engine, lambda k: model(samples(mesh.rank, k)).square().sum(), num_microbatches=num_microbatches
    )
    note("backward is over")
    return events, log.calls["all_reduce", "dp"]
