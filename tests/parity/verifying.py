"""`verify` on warm ranks: the reference of a job once, then any number of candidates against it.

The product's code, but for the start of processes: what is recorded, measured and judged is `meshwright verify`. A
fault may replace attributes of our modules and classes; `restored` puts them back, because the processes live on.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from meshwright.comm.mesh import Mesh
from meshwright.comm.transports.shared import SharedTransport
from meshwright.launching.verify import result_of
from meshwright.layout.plan import TrainPlan
from meshwright.testing.ranks import RankPool
from meshwright.verification.candidate import measure_rank
from meshwright.verification.job import Handover, RankReport, Reference, VerifyJob
from meshwright.verification.reference import run_reference
from meshwright.verification.result import VerifyResult

Inject = Callable[[Any], None]


@dataclass(frozen=True)
class Prepared:
    """A job whose reference has run.

    Attributes:
        job: without a fault.
        reference: what the run on one device left.
        path: its tensors.
    """

    job: VerifyJob
    reference: Reference
    path: Path


class Verifier:
    """References and candidates on the ranks of one pool; a context manager that ends them.

    A rank that raises ends the pool's ranks (the next call starts new ones) and gives a `RankError` with its text.

    Args:
        pool: somebody else's ranks, who ends them.
    """

    def __init__(self, pool: RankPool | None = None) -> None:
        self._pool = pool or RankPool()
        self._owns_pool = pool is None
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-trials-")
        self._num_references = 0

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owns_pool:
            self._pool.close()
        self._folder.cleanup()

    def prepare(self, job: VerifyJob) -> Prepared:
        """Run the reference of `job`; raises `RankError` with the text of what it raises."""
        self._num_references += 1
        path = Path(self._folder.name) / f"reference{self._num_references}.bin"
        (reference,) = self._pool.run(_reference, 1, job, path, timeout=300.0)
        return Prepared(job, reference, path)

    def forget(self, prepared: Prepared) -> None:
        """Delete the tensors of a reference."""
        prepared.path.unlink()

    def run(
        self,
        prepared: Prepared,
        inject: Inject | None = None,
        *,
        plan: TrainPlan | None = None,
        timeout: float = 60.0,
    ) -> VerifyResult:
        """Run the candidate and judge it.

        Args:
            prepared: the reference.
            inject: the fault.
            plan: another plan of the same batch, micro-steps and precision: the reference does not depend on ranks.
            timeout: seconds.
        """
        started = time.perf_counter()
        reports = self.measure(prepared, inject, plan=plan, timeout=timeout)
        job = replace(prepared.job, plan=plan or prepared.job.plan)
        seconds = time.perf_counter() - started
        return result_of(job, prepared.reference, reports, model="on warm ranks", seconds=seconds)

    def measure(
        self,
        prepared: Prepared,
        inject: Inject | None = None,
        *,
        plan: TrainPlan | None = None,
        timeout: float = 60.0,
        save: Handover | None = None,
        load: Handover | None = None,
    ) -> list[RankReport]:
        """Run the candidate only; arguments as of `run`, and where a checkpoint is left or loaded."""
        job = replace(prepared.job, inject=inject, plan=plan or prepared.job.plan)
        size = job.plan.world_size
        parts = (job, prepared.reference, prepared.path, save, load)
        return self._pool.run(_candidate, size, *parts, timeout=timeout)


def _reference(_mesh: Any, job: VerifyJob, path: Path) -> Reference:
    return run_reference(job, path)


def _candidate(
    mesh: Any,
    job: VerifyJob,
    reference: Reference,
    path: Path,
    save: Handover | None,
    load: Handover | None,
) -> RankReport:
    plan = job.plan
    transport = "gloo" if plan.transport == "auto" else plan.transport
    bound = Mesh(
        plan.mesh,
        mesh.world,
        log=mesh.log,
        device=mesh.device,
        sync=plan.sync,
        transport=transport,
        servers=plan.servers,
    )
    groups = bound.data_groups()
    for group in (groups.all, groups.shard, groups.replicate):
        if isinstance(group.transport, SharedTransport):
            group.transport.in_place_bytes = 0  # small as the models are
    with restored(), closing(bound):
        return measure_rank(job, reference, path, groups=groups, save=save, load=load)


@contextmanager
def restored() -> Iterator[None]:
    """What is replaced inside in our modules and classes, torch's functions and optimizers is put back."""
    spaces = [*_spaces()]
    before = [dict(vars(space)) for space in spaces]
    try:
        yield
    finally:
        for space, values in zip(spaces, before, strict=True):
            for name in [name for name in vars(space) if name not in values]:
                delattr(space, name)
            for name, value in values.items():
                if vars(space).get(name) is not value:
                    setattr(space, name, value)


def _spaces() -> Iterator[ModuleType | type]:
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "meshwright":
            yield module
            for value in list(vars(module).values()):
                if inspect.isclass(value) and value.__module__ == name:
                    yield value
    yield from (torch.nn.functional, torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
