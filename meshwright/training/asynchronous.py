"""An asynchronous run with parameter servers (`plan.staleness`), as one rank of it.

Owns how a rank's training steps become a run: each worker's engine is of the rank alone and makes the training step of
every run on its own samples; in between it exchanges gradients for weights (`push_pull.py`). Each push is an update of
its own, with the mean gradient of the worker's samples. W workers make W of them in a step of the run, so each has 1/W
of the learning rate: together they move as far as one step in lockstep. Which weights a gradient belongs to depends on
who is faster, and so does the result. At the end all workers hold the same weights, and ranks agree on losses again.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from meshwright.adapt.batch_norm import find_batch_norms
from meshwright.adapt.dropout import DropoutKind
from meshwright.comm import ops
from meshwright.comm.ops import DataGroups, alone
from meshwright.errors import PlanError
from meshwright.layout.plan import TrainPlan
from meshwright.layout.policy import find_policy
from meshwright.training.assemble import shard_model
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.push_pull import Server, Worker, parts_of_servers
from meshwright.training.state import TrainState
from meshwright.training.step import StepResult
from meshwright.training.task import Task, check_same_model


def alone_state(
    task: Task, plan: TrainPlan, groups: DataGroups, *, spec: OptimizerSpec, dropout: DropoutKind
) -> TrainState:
    """The state of this rank, which computes by itself; a server's optimizer updates its part, a worker's nothing.

    Raises:
        PlanError: E113 when ranks built different models, E223 for batch normalisation.
    """
    device = torch.device("cpu")
    norms = find_batch_norms(task.model)
    if norms:
        raise PlanError(
            "E223",
            f"plan.staleness = {plan.staleness} with batch normalisation ({len(norms)} modules): running statistics of "
            f"workers would drift apart. Leave plan.staleness out: in lockstep they are those of the whole batch.",
        )
    check_same_model(task.model, groups.all, device=device)
    ddp = replace(plan, policy=find_policy("ddp", bucket_bytes=plan.policy.bucket_bytes))
    engine = shard_model(
        task.model,
        ddp,
        DataGroups.of(alone("dp", groups.all)),
        device=device,
        initialiser=task.initialiser,
        dropout=dropout,
    )
    number = groups.all.index - groups.num_workers
    part = parts_of_servers(engine, groups.num_servers)[number] if groups.is_server else []
    return TrainState(engine, ShardedOptimizer(spec, part))


class AsynchronousRun:
    """One rank's part in a run.

    Args:
        state: made by `alone_state`; on a server its step grows to the end of the run in `serve`.
        groups: workers and servers.
        staleness: the bound.
        total_steps: of the run.

    Attributes:
        losses: of each step of this run over all workers' samples, once it is over.
        largest_lead: by how many steps a worker was ahead of the slowest, at most, once it is over.
        is_over: whether this rank has made all its steps.
    """

    def __init__(self, state: TrainState, groups: DataGroups, *, staleness: int, total_steps: int) -> None:
        self._state = state
        self._groups = groups
        self._staleness = staleness
        self._total_steps = total_steps
        self._first = (state.step, state.tokens)
        self._results: list[StepResult] = []
        self._worker = None if groups.is_server else Worker(state.engine, groups, total_steps)
        self.losses: list[float] = []
        self.largest_lead = 0
        self.is_over = False

    @property
    def is_stopped(self) -> bool:
        """Whether the run ended early because somebody was asked to stop."""
        return self.is_over and self._state.step < self._total_steps

    def exchange(self, step: int, result: StepResult, *, lr: float) -> None:
        """A worker's push and pull after training step number `step`; raises as `Worker.exchange`."""
        assert self._worker is not None, "a server makes no step"
        self._results.append(result)
        self._worker.exchange(step, lr=lr / self._groups.num_workers, wants_stop=result.stop)
        if self._state.step >= self._worker.last_step:
            self._finish(0)

    def serve(self) -> None:
        """A server's whole run; raises as `Server.serve`."""
        server = Server(
            self._state.engine,
            self._state.optimizer,
            self._groups,
            staleness=self._staleness,
            first_step=self._state.step,
            total_steps=self._total_steps,
        )
        server.serve()
        self._state.step = server.last_step
        self._finish(server.largest_lead)

    def line(self) -> str:
        """One line for people."""
        lead = f"the furthest worker was {self.largest_lead} steps ahead of the slowest"
        return f"async  staleness {self._staleness}: {lead}"

    def _finish(self, largest_lead: int) -> None:
        """What all ranks know once everybody is through: losses, samples and the largest lead."""
        (first_step, first_tokens), group = self._first, self._groups.all
        sums = torch.zeros(2, self._state.step - first_step, dtype=torch.float64)
        for number, result in enumerate(self._results):
            sums[:, number] = torch.tensor([result.loss * result.count, result.count], dtype=torch.float64)
        ops.all_reduce(sums, group, cause="losses of all workers").wait()
        leads = torch.zeros(group.size, dtype=torch.float64)
        ops.all_gather(leads, torch.tensor([largest_lead], dtype=torch.float64), group, cause="leads").wait()
        self.losses = (sums[0] / sums[1]).tolist()
        self.largest_lead = int(leads.max())
        self._state.tokens = first_tokens + int(sums[1].sum())
        self.is_over = True
