"""The training loop of one rank: connect, build, shard, step until done, evaluate, report.

The loop owns time, printing and files; everything that computes is in `step.py`. Every rank runs it; rank 0 prints
and writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.adapt import registry
from meshwright.checkpoint.folder import FOLDER_NAME, ResumeFrom
from meshwright.comm.log import CommLog, ring_path
from meshwright.comm.mesh import Mesh, World, connect, disconnect
from meshwright.comm.watchdog import Watchdog
from meshwright.data.batches import Batches
from meshwright.data.index_law import BatchGeometry
from meshwright.errors import NumericsError
from meshwright.layout.tensor_layout import CutRegion
from meshwright.pipeline.executor import PipelineExecutor
from meshwright.pipeline.part import Part
from meshwright.training import header
from meshwright.training.activations import budget_schedules, subject_of
from meshwright.training.agreeing import agree_on_plan
from meshwright.training.assemble import context_scope, shard_model
from meshwright.training.asynchronous import AsynchronousRun, alone_state
from meshwright.training.checkpoints import Checkpoints, Resumed, resume_lines
from meshwright.training.config import RunConfig
from meshwright.training.console import Console
from meshwright.training.cut_matrices import cut_matrices
from meshwright.training.determinism import prepare
from meshwright.training.device import choose_device
from meshwright.training.extent import learning_rate_of, total_steps_of
from meshwright.training.facts import run_facts
from meshwright.training.flops import Peak, device_peak
from meshwright.training.heldout import HeldOut
from meshwright.training.layouts import Example
from meshwright.training.ledger import recompute_share, usable_bytes
from meshwright.training.loss_scale import LossScale
from meshwright.training.metrics import (
    Meter,
    MetricsWriter,
    StepRecord,
    gather_numbers,
    median_step_seconds,
    peak_memory_bytes,
)
from meshwright.training.nonfinite import explain_not_finite
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer, spec_of
from meshwright.training.passes import loss_of_rank, surround_passes
from meshwright.training.planning import plan_of
from meshwright.training.precision import MASTER_DTYPES, warnings_of
from meshwright.training.randomness import StatelessDraws
from meshwright.training.result_file import RESULT_FILE, write_result
from meshwright.training.run_ledger import RunLedger
from meshwright.training.sequences import cutter, padding_warning
from meshwright.training.slices import on_slice
from meshwright.training.stages import Pipeline, make_pipeline
from meshwright.training.state import TrainState
from meshwright.training.step import StepResult, first_count, no_samples, train_step
from meshwright.training.step_times import step_times
from meshwright.training.task import Task, make_task, model_numbers
from meshwright.training.tree import cast_batch


@dataclass
class Progress:
    """What the loop has seen so far, for the report at the end."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    eval_loss: float | None = None


def run_worker(
    config: RunConfig,
    *,
    world: World,
    run_dir: Path,
    console: Console,
    resume: ResumeFrom | None = None,
    stop: Callable[[], bool] = lambda: False,
    make: Callable[[RunConfig], Task] | None = None,
) -> dict[str, Any]:
    """Train as one rank of `world`; the contract's result on every rank.

    Args:
        config: the run.
        world: who this process is.
        run_dir: run folder, the same on every rank; made if missing.
        console: where rank 0 prints; a console without a stream elsewhere.
        resume: where to look for a checkpoint to go on from; None: a fresh start.
        stop: whether this process has been asked to stop; then all ranks finish the step, save and return.
        make: the model, its loss and its data; None: what the configuration names.
    """
    make = make or make_task
    device = choose_device(config, world)
    log = CommLog(world.rank, world.size, ring_path(run_dir / "events", world.rank))
    # The watchdog must speak before the transport gives up by itself.
    connect(world, device=device, timeout_seconds=2 * config.train.watchdog + 60)
    try:
        with Watchdog(log, limit_seconds=config.train.watchdog, folder=run_dir, world_size=world.size):
            config = agree_on_plan(config, world, device=device, resume=resume, make=make, say=console.line)
            run = Run(config, world, run_dir=run_dir, console=console, device=device, log=log, make=make)
            with closing(run.mesh):
                return run.train(resume, stop)
    finally:
        console.close()
        disconnect()


class Run:
    """One rank's run, from a configuration to a result."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        *,
        run_dir: Path,
        console: Console,
        device: torch.device,
        log: CommLog,
        make: Callable[[RunConfig], Task] = make_task,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.console = console
        self.device = device
        self.is_first = world.rank == 0
        prepare(seed=config.train.seed, deterministic=config.train.deterministic)
        log.progress("building the model and opening data")
        source = {"slurm": "SLURM_NTASKS", "environment": "WORLD_SIZE", "single": ""}[world.source]
        self.plan = plan_of(config, world_size=world.size, world_source=source)
        self.mesh = Mesh.of_plan(self.plan, world, log=log, device=device)
        self.groups = self.mesh.data_groups()
        self.group = self.groups.all
        self.task = make(config)
        self.context = context_scope(self.plan, self.groups)
        self.executor: PipelineExecutor | None = None
        self.subject = subject_of(self.task, self.plan)
        self.schedules = budget_schedules(self.subject)
        # Asked of the model as it is: one whose forwards are wrapped already cannot be copied without its engine.
        executed = recompute_share(self.subject, schedules=self.schedules) if self.is_first else None
        self.pipeline = self._make_pipeline()
        self.ledger = self._predict(world)
        self.state = self._make_state()
        if self.pipeline is not None:
            self.state.stages = self.executor = self.pipeline.executor(self.state.engine)
        self.times = step_times(self.executor, self.plan, world, device)
        own_loss = no_samples if self.groups.is_server else self.task.loss
        self.loss = loss_of_rank(own_loss, self.context, self.executor)
        if self.ledger is not None:
            self.ledger.meet(self.state)
        self._use_geometry(self._geometry())
        self.heldout = HeldOut(
            self.state.engine, self.plan, self.groups, self.loss, config.train.eval_samples
        )
        self.total_steps = total_steps_of(config.train, self.task, global_batch=self.plan.global_batch)
        self.learning_rate = learning_rate_of(config.train, self.total_steps)
        self.peak: Peak | None = device_peak(device, self.plan.precision)
        self.meter = Meter(
            self.task.flops,
            self.peak,
            world_size=world.size,
            global_batch=self.plan.global_batch,
            executed=executed,
        )
        self.progress = Progress()
        self.resumed: Resumed | None = None
        self.is_stopped = False
        self.asynchronous: AsynchronousRun | None = None
        self.checkpoints = Checkpoints(
            run_dir / FOLDER_NAME,
            self.state,
            settings=config.save,
            facts=lambda: run_facts(config, self.plan, self.state, self.batches.geometry),
            say=console.line,
            groups=None if self.plan.staleness is None else self.groups,
        )

    def _predict(self, world: World) -> RunLedger | None:
        """The ledger of the first rank, which also refuses what cannot fit; none is known with tp."""
        if not self.is_first or self.groups.tensor is not None or self.groups.has_teams:
            return None
        usable = usable_bytes(self.device, local_size=world.local_size)
        subject = self.subject if self.pipeline is not None else on_slice(self.subject)
        return RunLedger(
            subject,
            self._optimizer_spec(),
            schedules=self.schedules,
            usable=usable,
            pipeline=self.pipeline,
        )

    def _optimizer_spec(self) -> OptimizerSpec:
        return spec_of(self.config.train.optimizer)

    def _make_state(self) -> TrainState:
        kind, plan = self.config.train.dropout, self.plan
        for text in [*self.mesh.warnings, *warnings_of(plan, self.device), *self._padding()]:
            self.console.line(text)
        for text in registry.warnings_of(
            self.task.model,
            dropout_kind=kind,
            num_ranks=self.groups.num_workers,
            num_microbatches=plan.num_microbatches,
        ):
            self.console.line(text)
        if plan.staleness is not None:
            return alone_state(self.task, plan, self.groups, spec=self._optimizer_spec(), dropout=kind)
        engine = shard_model(
            self.task.model,
            plan,
            self.groups,
            device=self.device,
            initialiser=self.task.initialiser,
            dropout=kind,
            schedules=self.schedules,
            example=Example(self.task.loss, self.task.train_data, plan.micro_batch, plan.precision),
            pipeline=self.pipeline,
        )
        if engine.tensor_layout is not None:
            for text in engine.tensor_layout.warnings:
                self.console.line(text)
        scale = LossScale() if plan.precision == "fp16" else None
        optimizer = ShardedOptimizer(self._optimizer_spec(), engine.shards, cut_matrices(engine))
        return TrainState(engine, optimizer, loss_scale=scale)

    def _make_pipeline(self) -> Pipeline | None:
        made = make_pipeline(
            self.task.model,
            self.task.loss,
            self.task.train_data,
            self.plan,
            self.groups,
            device=self.device,
            cut_batch=Part if self.context is None else cutter(self.context),
        )
        for text in () if made is None else made.plan.warnings:
            self.console.line(text)
        return made

    def _padding(self) -> list[str]:
        length = self.task.shape.get("sequence")
        if self.context is None or length is None:
            return []
        text = padding_warning(length, self.context.group.size, self.context.kind)
        return [] if text is None else [text]

    def _use_geometry(self, geometry: BatchGeometry) -> None:
        """Samples and dropout masks by where the global batch of a step begins in the stream."""
        self.batches = Batches(self.task.train_data, geometry, seed=self.config.train.seed)
        draws = None
        if self.config.train.dropout == "stateless":
            draws = StatelessDraws(
                geometry,
                seed=self.config.train.seed,
                must_agree=partial(self.group.log.must_agree, self.groups.workers.axis),
                region=self._region(),
                sequence=None if self.context is None else self.context.region,
            )
        surround_passes(self.state, draws, self.context, self.executor)

    def _region(self) -> CutRegion | None:
        layout = self.state.engine.tensor_layout
        return None if layout is None else layout.region

    def _geometry(self) -> BatchGeometry:
        return BatchGeometry(
            global_batch=self.plan.global_batch,
            num_microbatches=self.plan.num_microbatches,
            dp_size=self.groups.num_readers,
            dp_rank=self.groups.reader_index,
        )

    # The loop.

    def train(
        self, resume: ResumeFrom | None = None, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Run to the end, from a checkpoint if there is one at `resume`, and return the contract's result."""
        self._print_header()
        if resume is not None:
            self._resume(resume)
        self.checkpoints.start()
        writer = self._make_writer() if self.is_first else None
        self.task.model.train()
        if self.state.loss_scale is not None and not self.state.tokens:
            self.state.expected_count = first_count(
                self.state.engine,
                self._micro_batch(0, 0),
                loss=self.loss,
                num_microbatches=self.plan.num_microbatches,
            )
        started = time.perf_counter()
        try:
            last = self.total_steps is not None and self.state.step >= self.total_steps
            if self.plan.staleness is not None and not last:
                last = self._start_asynchronous(self.plan.staleness)
            while not last and not self.is_stopped:
                self.state.stop_requested = stop()
                result, seconds = self._timed_step()
                last, self.is_stopped = self._is_last(time.perf_counter() - started), result.stop
                if self.asynchronous is not None:
                    last, self.is_stopped = self.asynchronous.is_over, self.asynchronous.is_stopped
                stall, eval_loss = self._after_step(last=last)
                self._record(self._step_record(result, seconds, eval_loss, stall), writer, last=last)
            self.checkpoints.finish()
            if self.asynchronous is not None:
                self.progress.losses = self.asynchronous.losses
                self.console.line(self.asynchronous.line())
            if self.is_stopped:
                self.console.line(f"stop   asked to, after step {self.state.step}; go on with --resume auto")
        finally:
            if writer is not None:
                writer.close()
        report = self._report()
        if self.times is not None:
            self.times.write(self.run_dir)
        if self.is_first:
            write_result(self.run_dir, report, log=self.mesh.log, device=self.device)
        return report

    def _after_step(self, *, last: bool) -> tuple[float | None, float | None]:
        """Save and evaluate where it is time: seconds for which training stood still, held-out loss."""
        stall = self.checkpoints.after_step(last=last or self.is_stopped)
        due = self.config.train.eval_every.due(self.state.step, last=last) and not self.is_stopped
        return stall, self._evaluate() if due else None

    def _start_asynchronous(self, staleness: int) -> bool:
        """Whether this rank is through with all steps: a server makes its updates here."""
        assert self.total_steps is not None, "a run that stops by time has no staleness (E223)"
        self.asynchronous = AsynchronousRun(
            self.state, self.groups, staleness=staleness, total_steps=self.total_steps
        )
        if not self.groups.is_server:
            return False
        self.asynchronous.serve()
        self.is_stopped = self.asynchronous.is_stopped
        self._after_step(last=True)
        return True

    def _resume(self, request: ResumeFrom) -> None:
        config = self.config
        self.resumed = self.checkpoints.resume(
            request, optimizer=config.train.optimizer.name, numbers=model_numbers(config)
        )
        if self.resumed is None:
            self.console.line(f"resume no checkpoint in {request.place}: a fresh start at step 0")
            return
        saved = self.resumed.manifest.run
        offset = saved.samples - saved.step * self.plan.global_batch
        self._use_geometry(replace(self._geometry(), first_sample=offset))
        now = run_facts(config, self.plan, self.state, self.batches.geometry)
        described = self.plan.describe()
        for text in resume_lines(
            self.resumed, now, world_size=self.groups.everyone.size, described=described
        ):
            self.console.line(text)
        if self.total_steps is not None and self.state.step >= self.total_steps:
            self.console.line(f"resume nothing is left to do: train.stop_at is {config.train.stop_at}")

    def _timed_step(self) -> tuple[StepResult, float]:
        start = time.perf_counter()
        with self.ledger.step(self.state) if self.ledger is not None else nullcontext():
            result = self.make_step(self.state.step)
        return result, time.perf_counter() - start

    def make_step(self, step: int) -> StepResult:
        """One training step on the samples of step number `step`, from 0."""
        result = train_step(
            self.state,
            lambda k: self._micro_batch(step, k),
            loss=self.loss,
            num_microbatches=self.plan.num_microbatches,
            lr=self.learning_rate.at(step),
            clip_norm=self.config.train.clip_norm,
        )
        if result.overflowed:
            assert self.state.loss_scale is not None, "a gradient overflows under a loss scale only"
            self.console.line(header.skipped_line(step, self.state.loss_scale))
        elif not result.applied:
            raise self._not_finite(step)
        if self.asynchronous is not None:
            self.asynchronous.exchange(step, result, lr=self.learning_rate.at(step))
        return result

    def _micro_batch(self, step: int, microbatch: int) -> Any:
        if self.groups.is_server:
            return None
        batch = self.batches.micro_batch(step, microbatch)
        return cast_batch(batch, MASTER_DTYPES[self.plan.precision], self.device)

    def _not_finite(self, step: int) -> NumericsError:
        return explain_not_finite(self.state.engine, self._replayed(step), loss=self.loss, step=step)

    def _replayed(self, step: int) -> Iterator[Any]:
        """The step's batches; while the caller uses one, dropout draws the masks that it had."""
        for k in range(self.plan.num_microbatches):
            batch = self._micro_batch(step, k)
            with self.state.randomness(step, k):
                yield batch

    def _is_last(self, elapsed: float) -> bool:
        if self.total_steps is not None:
            return self.state.step >= self.total_steps
        # Ranks must stop at the same step, and their clocks differ: the slowest decides.
        limit = self.config.train.stop_at.amount
        return max(gather_numbers(elapsed, self.groups.everyone, self.device)) >= limit

    def _evaluate(self) -> float | None:
        """Held-out loss over all ranks; None where the task has no held-out data."""
        if self.task.heldout_data is None:
            return None
        self.progress.eval_loss = self.heldout.loss_on(self.task.heldout_data)
        return self.progress.eval_loss

    def _control(self) -> dict[str, float] | None:
        """What the control found, where one is asked for and the run came to its end."""
        asked = self.config.train.control == "shuffled_context" and not self.is_stopped
        if not asked or "sequence" not in self.task.shape or self.task.heldout_data is None:
            return None
        losses = dict(self.heldout.shuffled_context(self.task.heldout_data))
        self.console.line(header.control_line(losses))
        return losses

    # What people see.

    def _make_writer(self) -> MetricsWriter:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "plan.lock.json").write_text(self.plan.to_json())
        (self.run_dir / RESULT_FILE).unlink(missing_ok=True)  # of a run that was here before
        return MetricsWriter(
            self.run_dir,
            tensorboard="tensorboard" in self.config.log.to,
            after_step=self.state.step,
        )

    def _print_header(self) -> None:
        say = self.console.line
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU process"
        say(f"run    {self.run_dir}   {self.task.name}   {self.groups.everyone.size} x {device}")
        for text in header.plan_lines(self.plan) + header.axes_lines(self.plan, self.task.shape):
            say(text)
        if self.plan.policy.ownership == "whole" and self.plan.staleness is None:
            say(header.owners_line(self.state.engine.units, self.groups))
        say(
            f"mfu    peak {self.peak.flops_per_second / 1e9:,.1f} GFLOP/s a device ({self.peak.name})"
            if self.peak
            else "mfu    unknown: this device is not in the table, and a wrong peak would lie"
        )

    def _step_record(
        self, result: StepResult, seconds: float, eval_loss: float | None, stall: float | None
    ) -> StepRecord:
        self.progress.losses.append(result.loss)
        self.progress.seconds.append(seconds)
        return StepRecord(
            step=self.state.step,
            loss=result.loss,
            grad_norm=None if result.overflowed else result.grad_norm,
            lr=self.learning_rate.at(self.state.step - 1),
            tokens=self.state.tokens,
            seconds=seconds,
            tokens_per_second=result.count / seconds,
            mfu=self.meter.utilisation(seconds),
            hfu=self.meter.executed_share(seconds),
            eval_loss=eval_loss,
            save_stall_seconds=stall,
            loss_scale=None if self.state.loss_scale is None else self.state.loss_scale.value,
        )

    def _record(self, record: StepRecord, writer: MetricsWriter | None, *, last: bool) -> None:
        first = len(self.progress.losses) == 1
        if writer is not None:
            writer.step(record)
        line = header.step_line(record, self.total_steps)
        stays = last or first or record.eval_loss is not None
        if stays or record.step % self.config.log.print_every == 0:
            self.console.line(line)
        else:
            self.console.status(line)
        memory = None if self.ledger is None else self.ledger.line_after_step(self.state, last=last)
        if memory is not None:
            self.console.line(memory)

    def _report(self) -> dict[str, Any]:
        control = self._control()
        peaks = gather_numbers(float(peak_memory_bytes(self.device)), self.groups.everyone, self.device)
        seconds = median_step_seconds(self.progress.seconds)
        steady, losses = self.progress.seconds[1:] or self.progress.seconds, self.progress.losses
        tokens_a_step = self.state.tokens / max(1, self.state.step)
        mfu, mfu_causal = self.meter.utilisation(seconds), self.meter.utilisation(seconds, causal=True)
        self.console.line(header.end_line(self.state.step, losses, self.progress.eval_loss, seconds=seconds))
        if mfu is not None and mfu_causal is not None and self.peak is not None:
            on_gpu = self.device.type == "cuda"
            self.console.line(header.mfu_line(mfu, mfu_causal, self.peak.name, on_gpu=on_gpu))
        return {
            "run_dir": str(self.run_dir),
            "steps": self.state.step,
            "tokens": self.state.tokens,
            "first_loss": losses[0] if losses else None,
            "final_loss": losses[-1] if losses else None,
            "eval_loss": self.progress.eval_loss,
            "control_loss": control,
            "tokens_per_second": tokens_a_step * len(steady) / sum(steady) if steady else 0.0,
            "step_seconds_median": seconds,
            "mfu": mfu,
            "hfu": self.meter.executed_share(seconds),
            "memory_bytes": None if self.ledger is None else self.ledger.ledger.to_json(),
            "mfu_causal": mfu_causal,
            "mfu_peak": self.peak.name if self.peak else None,
            "peak_memory_bytes": [int(value) for value in peaks],
            "world_size": self.mesh.world.size,
            "mesh": self.plan.mesh.sizes(),
            "resumed_from": str(self.resumed.path) if self.resumed else None,
            "interrupted": self.is_stopped,
            "checkpoint": str(self.checkpoints.newest) if self.checkpoints.newest else None,
        }
