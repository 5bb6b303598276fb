"""A rank of the run under test, from a task to a state that can be trained: the product's own path.

Owns that path: shard, cut, adapt, as training does it. Must not know what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from meshwright.adapt.float64 import float64_throughout
from meshwright.comm.ops import DataGroups
from meshwright.data.batches import Batches
from meshwright.data.index_law import BatchGeometry
from meshwright.pipeline.executor import PipelineExecutor
from meshwright.pipeline.part import Part
from meshwright.recompute.install import reruns_of_model
from meshwright.training.activations import budget_schedules, subject_of
from meshwright.training.assemble import context_scope, shard_model
from meshwright.training.cut_matrices import cut_matrices
from meshwright.training.layouts import Example
from meshwright.training.optimizer import ShardedOptimizer, spec_of
from meshwright.training.passes import loss_of_rank, surround_passes
from meshwright.training.randomness import StatelessDraws
from meshwright.training.sequences import cutter
from meshwright.training.stages import make_pipeline
from meshwright.training.state import TrainState
from meshwright.training.step import no_samples
from meshwright.training.task import Task
from meshwright.verification.job import VerifyJob
from meshwright.verification.rank import CandidateRank


def build_rank(job: VerifyJob, task: Task, groups: DataGroups, *, clip_norm: float | None) -> CandidateRank:
    """The product path from a task to a state that can be trained."""
    plan, chosen, workers = job.plan, job.config.train.optimizer, groups.workers
    kind = job.config.train.dropout
    schedules = budget_schedules(subject_of(task, plan))
    context = context_scope(plan, groups)
    pipeline = make_pipeline(
        task.model,
        task.loss,
        task.train_data,
        plan,
        groups,
        device=torch.device("cpu"),
        cut_batch=Part if context is None else cutter(context),
    )
    engine = shard_model(
        task.model,
        plan,
        groups,
        device=torch.device("cpu"),
        initialiser=task.initialiser,
        dropout=kind,
        schedules=schedules,
        example=Example(task.loss, task.train_data, plan.micro_batch, plan.precision),
        pipeline=pipeline,
    )
    spec = spec_of(chosen)
    geometry = BatchGeometry(
        global_batch=plan.global_batch,
        num_microbatches=plan.num_microbatches,
        dp_size=groups.num_readers,
        dp_rank=groups.reader_index,
    )
    state = TrainState(engine, ShardedOptimizer(spec, engine.shards, cut_matrices(engine)))
    executor = None if pipeline is None else pipeline.executor(engine)
    state.stages = executor
    draws = None
    if kind == "stateless":
        draws = StatelessDraws(
            geometry,
            seed=job.config.train.seed,
            must_agree=partial(workers.log.must_agree, workers.axis),
            region=None if engine.tensor_layout is None else engine.tensor_layout.region,
            sequence=None if context is None else context.region,
        )
    surround_passes(state, draws, context, executor)
    part = no_samples if groups.is_server else task.loss
    return CandidateRank(
        rank=groups.all.ranks[groups.all.index],
        engine=engine,
        state=state,
        batches=Batches(task.train_data, geometry, seed=job.config.train.seed),
        loss=loss_of_rank(part, context, executor),
        loss_of_part=part,
        num_microbatches=plan.num_microbatches,
        clip_norm=clip_norm,
        executor=executor,
        again=reruns_of_model(engine.model, plan.recompute, schedules),
        context=context,
    )


def widen(state: TrainState, executor: PipelineExecutor | None) -> None:
    """Float64 throughout every forward and backward; whatever else happens in a step stays as it is."""
    if executor is not None:
        executor.scopes = (float64_throughout, *executor.scopes)
    randomness = state.randomness

    @contextmanager
    def both(step: int, microbatch: int) -> Iterator[None]:
        with float64_throughout(), randomness(step, microbatch):
            yield

    state.randomness = both
