"""What travels between workers and parameter servers without lockstep, and when a server answers.

Owns the one rule: a worker may start step t only while t is at most B steps ahead of the number of steps that the
slowest worker has finished. A server applies each push as it arrives, one update a push, and answers with its weights
when the worker may go on; so the bound holds on every server, and with it between any two workers. Each server also
writes down the largest lead that it saw, and a lead above B ends the run. Knows nothing of runs (`asynchronous.py`).

To stop early, the first server names a number of steps that every worker still reaches: all end with the same step and,
as the last answers wait for the last push, with the same weights.

Sources: Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NeurIPS 2013; Dean
et al., Large Scale Distributed Deep Networks, NeurIPS 2012.
Simplification: servers keep whole copies of the model's weights and gradients, of which they use their own part.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm import ops
from meshwright.comm.ops import DataGroups, Handle
from meshwright.errors import WorkerError
from meshwright.layout.grouping import assign_owners
from meshwright.sharding.engine import ShardingEngine, ShardParameter
from meshwright.training.optimizer import ShardedOptimizer

_HEADER, _GRADIENT, _ANSWER, _WEIGHTS = range(4)  # tags
_HEAD_NUMEL = 4  # numbers of a header before its flags


def parts_of_servers(engine: ShardingEngine, num_servers: int) -> list[list[ShardParameter]]:
    """The parameters of each server: the same on every rank, balanced as in lockstep."""
    buckets = [bucket.parameters for unit in engine.units for bucket in unit.buckets if bucket.trainable]
    owners = assign_owners(buckets, num_servers)
    return [[shard for shard in engine.shards if owners[shard.name] == s] for s in range(num_servers)]


@dataclass(frozen=True)
class _Push:
    """What comes before a gradient.

    Attributes:
        step: of the worker.
        lr: learning rate of this update.
        is_last: whether this is the worker's last step.
        wants_stop: whether the worker has been asked to stop.
        used: for each parameter of the server whether it has a gradient.
    """

    step: int
    lr: float
    is_last: bool
    wants_stop: bool
    used: tuple[bool, ...]

    def packed(self) -> Tensor:
        return torch.tensor(
            [self.step, self.lr, self.is_last, self.wants_stop, *self.used], dtype=torch.float64
        )

    @classmethod
    def unpacked(cls, header: Tensor) -> _Push:
        step, lr, is_last, wants_stop, *used = header.tolist()
        return cls(int(step), lr, bool(is_last), bool(wants_stop), tuple(bool(flag) for flag in used))


class Worker:
    """A worker's side.

    Args:
        engine: of this rank alone.
        groups: workers and servers.
        total_steps: of the run.

    Attributes:
        last_step: number of steps after which this run ends; less than `total_steps` once somebody asked to stop.
    """

    def __init__(self, engine: ShardingEngine, groups: DataGroups, total_steps: int) -> None:
        self._engine = engine
        self._group = groups.all
        self._first_server = groups.num_workers
        self._parts = parts_of_servers(engine, groups.num_servers)
        self.last_step = total_steps

    def exchange(self, step: int, *, lr: float, wants_stop: bool) -> None:
        """Push the gradient of `step`, which the engine holds normalised, and pull weights for the next one.

        Returns when this worker may start it; after the last step when all workers are done.

        Raises:
            WorkerError: E401 when a server is gone.
        """
        used = dict(zip(self._engine.parameter_names, self._engine.used_mask().tolist(), strict=True))
        is_last = step + 1 >= self.last_step
        handles = []
        for number, part in enumerate(self._parts):
            flags = tuple(used[shard.name] > 0 for shard in part)
            push = _Push(step, lr, is_last, wants_stop, flags)
            handles.append(self._send(push.packed(), number, _HEADER))
            if part:
                gradient = torch.cat([shard.gradient.reshape(-1) for shard in part])
                handles.append(self._send(gradient, number, _GRADIENT))
        for handle in handles:
            handle.wait()
        self._group.log.progress("waiting for weights")
        for number, part in enumerate(self._parts):
            answer = torch.zeros(1, dtype=torch.float64)
            self._receive(answer, number, _ANSWER).wait()
            if number == 0:
                self.last_step = min(self.last_step, int(answer))
            if part:
                weights = _flat_like(part)
                self._receive(weights, number, _WEIGHTS).wait()
                _unpack(weights, [shard.parameter for shard in part])
        self._engine.publish_masters()

    def _send(self, tensor: Tensor, server: int, tag: int) -> Handle:
        index = self._first_server + server
        return ops.send(tensor, self._group, index=index, tag=tag, cause=f"push to server {server}")

    def _receive(self, tensor: Tensor, server: int, tag: int) -> Handle:
        index = self._first_server + server
        return ops.receive(tensor, self._group, index=index, tag=tag, cause=f"pull from server {server}")


class Server:
    """A server's side: one thread a worker receives, the calling one updates and answers.

    Args:
        engine: of this rank alone; the server's parameters are in it.
        optimizer: over this server's part.
        groups: workers and servers.
        staleness: the bound B.
        first_step: steps that all workers have finished before.
        total_steps: of the run.

    Attributes:
        largest_lead: by how many steps a worker was ahead of the slowest at most.
        last_step: number of steps after which the run ends.
    """

    def __init__(
        self,
        engine: ShardingEngine,
        optimizer: ShardedOptimizer,
        groups: DataGroups,
        *,
        staleness: int,
        first_step: int,
        total_steps: int,
    ) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._part = optimizer.shards
        self._group = groups.all
        self._staleness = staleness
        self._number = groups.all.index - groups.num_workers
        self._finished: list[float] = [first_step] * groups.num_workers
        self._granted = [first_step] * groups.num_workers  # the newest step that each may run
        self._waiting: set[int] = set()
        self._arrivals: queue.SimpleQueue[tuple[int, _Push, Tensor] | WorkerError] = queue.SimpleQueue()
        self._issuing = threading.Lock()  # the log numbers operations one by one
        self.largest_lead = 0
        self.last_step = total_steps

    def serve(self) -> None:
        """Until every worker has made its last step.

        Raises:
            WorkerError: E401 when a worker is gone, E406 when one was further ahead than the bound.
        """
        for worker in range(len(self._finished)):
            threading.Thread(
                target=self._listen, args=(worker,), daemon=True, name=f"worker {worker}"
            ).start()
        sent: dict[int, list[Handle]] = {}
        while self._waiting or not all(map(math.isinf, self._finished)):
            arrival = self._arrivals.get()
            if isinstance(arrival, WorkerError):
                raise arrival
            worker, push, gradient = arrival
            for handle in sent.pop(worker, []):
                handle.wait()  # it has read its last answer
            self._take(worker, push, gradient)
            sent |= {ready: self._answer(ready) for ready in self._ready()}
        for handle in [handle for handles in sent.values() for handle in handles]:
            handle.wait()

    def _listen(self, worker: int) -> None:
        """Hand over what comes from `worker` until its last step; the next push follows the answer to this one."""
        header = torch.zeros(_HEAD_NUMEL + len(self._part), dtype=torch.float64)
        gradient = _flat_like(self._part)
        try:
            while True:
                self._receive(header, worker, _HEADER).wait()
                if self._part:
                    self._receive(gradient, worker, _GRADIENT).wait()
                push = _Push.unpacked(header)
                self._arrivals.put((worker, push, gradient))
                if push.is_last:
                    return
        except WorkerError as error:
            self._arrivals.put(error)

    def _take(self, worker: int, push: _Push, gradient: Tensor) -> None:
        """Apply a push, and count the worker's step."""
        self._group.log.progress(f"update by worker {worker}", push.step)
        self._note_lead(worker, push.step)
        _unpack(gradient, [shard.gradient for shard in self._part])
        used = {shard.name for shard, flag in zip(self._part, push.used, strict=True) if flag}
        self._optimizer.step(lr=push.lr, used=used)
        self._finished[worker] = math.inf if push.is_last else push.step + 1
        self._waiting.add(worker)
        if push.wants_stop and self._number == 0:
            # The furthest worker may be in a step that it has not called its last: one more, for all.
            self.last_step = min(self.last_step, max(self._granted) + 2)

    def _ready(self) -> list[int]:
        """Waiting workers that may start their next step, or are all done."""
        return sorted(worker for worker in self._waiting if self._may_go_on(worker))

    def _may_go_on(self, worker: int) -> bool:
        slowest, mine = min(self._finished), self._finished[worker]
        return math.isinf(slowest) if math.isinf(mine) else mine <= slowest + self._staleness

    def _answer(self, worker: int) -> list[Handle]:
        self._waiting.discard(worker)
        if not math.isinf(self._finished[worker]):
            self._granted[worker] = int(self._finished[worker])
            self._note_lead(worker, self._granted[worker])
        weights = [shard.parameter.detach().reshape(-1) for shard in self._part]
        answer = torch.tensor([self.last_step], dtype=torch.float64)
        return [
            self._send(answer, worker, _ANSWER),
            *([self._send(torch.cat(weights), worker, _WEIGHTS)] if weights else []),
        ]

    def _note_lead(self, worker: int, step: int) -> None:
        """A worker starts or has made `step`: by how much is it ahead of the slowest?"""
        slowest = min(self._finished)
        if math.isinf(slowest):
            return
        lead = int(step - slowest)
        self.largest_lead = max(self.largest_lead, lead)
        if lead > self._staleness:
            raise WorkerError(
                "E406",
                f"worker {worker} is in step {step} and the slowest worker has finished {slowest:g} steps: {lead} "
                f"ahead, and plan.staleness = {self._staleness}. Server {self._number} answered, or the worker went "
                f"on, too early.",
            )

    def _send(self, tensor: Tensor, worker: int, tag: int) -> Handle:
        with self._issuing:
            return ops.send(tensor, self._group, index=worker, tag=tag, cause=f"answer to worker {worker}")

    def _receive(self, tensor: Tensor, worker: int, tag: int) -> Handle:
        with self._issuing:
            return ops.receive(tensor, self._group, index=worker, tag=tag, cause=f"push of worker {worker}")


def _flat_like(part: Sequence[ShardParameter]) -> Tensor:
    """Memory for all elements of `part`, in the type that a concatenation of them has."""
    return (
        torch.cat([torch.empty_like(shard.gradient).reshape(-1) for shard in part])
        if part
        else torch.empty(0)
    )


@torch.no_grad()
def _unpack(flat: Tensor, targets: Sequence[Tensor]) -> None:
    """Cut `flat` into `targets`, in their order."""
    pieces = flat.split([target.numel() for target in targets])
    for target, values in zip(targets, pieces, strict=True):
        target.copy_(values.view(target.shape))
