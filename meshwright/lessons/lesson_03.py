"""The parameter server: ranks that hold the weights, to which others push gradients and from which they pull.

In lockstep a server waits for the gradients of all workers, makes one update and sends the weights: the same numbers as
an all-reduce, on other wires. Without lockstep it updates at each push, so a fast worker need not wait for a slow one,
and its gradient belongs to weights that others have changed since. How old they may be is a choice: the bound.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from meshwright.comm.ops import DataGroups, alone
from meshwright.exchange.catalogue import make_exchange
from meshwright.exchange.cost import formula
from meshwright.exchange.draw import step_by_step
from meshwright.layout.policy import find_policy
from meshwright.lessons.parity import check_parity, groups_of, samples, small_gpt
from meshwright.lessons.pictures import bars
from meshwright.models.loss import language_model_loss
from meshwright.sharding.engine import ShardingEngine
from meshwright.testing.ranks import RankPool
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.push_pull import Server, Worker, parts_of_servers
from meshwright.training.state import TrainState
from meshwright.training.step import train_step

NUM_WORKERS, NUM_SERVERS, NUM_STEPS, LR, SLOW_SECONDS = 2, 1, 30, 0.02, 0.02
SPEC = OptimizerSpec("adamw", lr=LR, weight_decay=0.0)


def main() -> None:
    """Run the lesson."""
    pool = RankPool()
    print("1. Two workers, one server (rank 2). A push sums, in the order of ranks; a pull copies.\n")
    for half in ("reduce", "broadcast"):
        print(step_by_step(make_exchange("parameter_server", half, NUM_WORKERS)))
    print("\n2. In lockstep it is data parallelism:\n")
    print(check_parity(pool, "parameter_server", num_ranks=NUM_WORKERS + NUM_SERVERS, num_servers=1).line())
    print(
        "\n3. Bytes through the busiest rank, as a part of the buffer S: the server's grow with the workers.\n"
    )
    for n in (2, 8, 64):
        busiest = {"ring": formula("ring", "all_reduce", n, 1.0).busiest}
        for k in (1, 4):
            busiest[f"{k} server{'s' * (k > 1)}"] = formula(
                "parameter_server", "all_reduce", n, 1.0, num_servers=k
            ).busiest
        print(f"  {n} workers\n" + bars(busiest, unit="S", digits=3))
    print("\n4. Without lockstep, worker 1 slow: mean loss over ten steps, and the largest lead.\n")
    curves = {}
    for bound in (0, 4):
        answers = pool.run(asynchronous, NUM_WORKERS + NUM_SERVERS, bound)
        curves[bound] = answers[0]["losses"]
        lead = answers[-1]["lead"]
        means = [sum(curves[bound][i : i + 10]) / 10 for i in range(0, NUM_STEPS, 10)]
        print(f"  bound {bound}: loss {' → '.join(f'{mean:.3f}' for mean in means)}   largest lead {lead}")
        assert lead <= bound
        assert means[-1] < means[0]
    print(f"  the same curve: {curves[0] == curves[4]}. Each run of a bound above 0 has its own.")
    pool.close()


def asynchronous(mesh: Any, bound: int) -> dict[str, Any]:
    """Train on workers that push and pull after each step of their own; worker 1 sleeps before each."""
    groups = groups_of(mesh, NUM_SERVERS)
    own = DataGroups.of(alone("dp", groups.all))
    engine = ShardingEngine(small_gpt(), policy=find_policy("ddp"), groups=own, device=torch.device("cpu"))
    if groups.is_server:
        (part,) = parts_of_servers(engine, NUM_SERVERS)
        rule = ShardedOptimizer(SPEC, part)
        server = Server(engine, rule, groups, staleness=bound, first_step=0, total_steps=NUM_STEPS)
        server.serve()
        return {"lead": server.largest_lead}
    state, worker = TrainState(engine, ShardedOptimizer(SPEC, [])), Worker(engine, groups, NUM_STEPS)
    losses, place = [], {"num_microbatches": 1, "dp_size": NUM_WORKERS, "dp_rank": mesh.rank}
    for step in range(NUM_STEPS):
        time.sleep(SLOW_SECONDS * (mesh.rank == 1))
        batch = partial(samples, step % 3, **place)
        result = train_step(state, batch, loss=language_model_loss, num_microbatches=1, lr=LR, clip_norm=None)
        worker.exchange(step, lr=LR / NUM_WORKERS, wants_stop=False)
        losses.append(result.loss)
    return {"losses": losses}
