"""Starting a comparison: one process for the reference, then the candidate's ranks, then the judgement here.

Owns the temporary folder, which is kept only where a worker failed and its log is worth reading. The launcher never
imports torch: workers measure, and `verification/judge.py` needs numbers only. The two runs follow each other, so the
peak of memory is the larger of them, not their sum.
"""

from __future__ import annotations

import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import cloudpickle

from meshwright.errors import ConfigError, PlanError, WorkerError
from meshwright.launching.deciding import Decide, decide_locally, with_plan
from meshwright.launching.local import run_local
from meshwright.launching.messages import WorkerContext
from meshwright.launching.plan_result import PlanResult
from meshwright.launching.verify_sources import keys_of_lock, layout_overrides, read_source
from meshwright.layout.plan import Precision
from meshwright.training.config import Resolved, RunConfig, load_config
from meshwright.training.deciding import decided
from meshwright.training.planning import local_world_size, num_workers_of, plan_of
from meshwright.training.units import split_at_commas
from meshwright.verification.cut import cut_overrides, eps_override
from meshwright.verification.job import Functions, Handover, RankReport, Reference, VerifyJob
from meshwright.verification.judge import judge
from meshwright.verification.result import VerifyResult
from meshwright.verification.resumed import resume_check, resumed_job
from meshwright.verification.signatures import Sizes

if TYPE_CHECKING:
    from meshwright.comm.mesh import World
    from meshwright.verification.rank import CandidateRank

DEFAULT_PROCESSES = 4
DEFAULT_STEPS = 3
_TENSORS = "reference.bin"
_DEFAULT_MICRO_BATCH = 2
PRECISION_WORDS = MappingProxyType(
    {
        "fp64": "float64",
        "fp32": "float32",
        "bf16": "bfloat16 with float32 masters",
        "fp16": "float16 with float32 masters and a loss scale",
    }
)
_DEFAULT_MICROBATCHES = 2


class VerifyOptions(TypedDict, total=False):
    """What `verify` may be told beside its arguments.

    Keys:
        steps: optimizer steps to compare, default 3.
        global_batch: samples of a step; default: 2 a rank in each of 2 micro-steps.
        precision: `fp64` (default), `fp32`, `bf16` or `fp16`, for both runs.
        optimizer: `adamw` (default), `adam`, `sgd` or `muon`.
        clip_norm: largest global gradient norm, default 1.0; 0 does not clip. It is lowered so that it acts.
        seed: of weights and sample order, default 0.
        resume: whether another layout also goes on from a checkpoint of the candidate; default: yes, where the
            candidate itself is right.
        layout: roles of the model's layers under tp, as in `plan.layout`.
        inject: commits a fault on every candidate rank before training; see `CandidateRank`.
    """

    steps: int
    global_batch: int
    precision: Precision
    optimizer: Literal["adamw", "adam", "sgd", "muon"]
    clip_norm: float
    seed: int
    resume: bool
    layout: Mapping[str, str]
    inject: Callable[[CandidateRank], None]


@dataclass(frozen=True)
class SourceOptions:
    """What the command line may ask of a comparison.

    Attributes:
        plan: keys of `plan` as `tp=2,pp=2,zero=1`; they override the source's.
        processes: candidate ranks; None: the source's, else 4.
        precision: `fp64`, `fp32`, `bf16` or `fp16`.
        steps: optimizer steps to compare.
        full: keep the sizes of a known architecture.
        resume: whether another layout also goes on from a checkpoint of the candidate.
    """

    plan: str = ""
    processes: int | None = None
    precision: str = "fp64"
    steps: int = DEFAULT_STEPS
    full: bool = False
    resume: bool = True


def verify(
    build: Callable[[], Any],
    loss: Callable[[Any, Any], Any],
    data: Any,
    *,
    plan: str | PlanResult = "zero=1",
    processes: int | None = None,
    **options: Unpack[VerifyOptions],
) -> VerifyResult:
    """Train a model by `plan` on local processes and on one device alike, and compare all they compute.

    The functions and the data travel to the workers by cloudpickle, so lambdas and local functions work.

    Args:
        build: () -> nn.Module, the same at each call.
        loss: (model, batch) -> (sum, count), or a bare scalar that is a mean over samples.
        data: map-style dataset whose items torch's default collate stacks.
        plan: keys of the run file's `plan` table: `zero=2,micro_batch=3`; or what `meshwright.plan` returned, whose
            first plan that training runs is taken with its batch and number of processes, for a model of any size.
        processes: candidate ranks on this machine; None: the plan's, else 4.
        **options: see `VerifyOptions`.

    Returns:
        The result: `.ok`, `.checks`, `.table()`, `.to_json()`.

    Raises:
        ConfigErrors: unknown plan keys (E101) and those that are not built (E110).
        PlanError: E200, E203 for a plan that does not fit the processes or the batch, E298 where training runs none.
        ConfigError: E111, E112, E801, E802 about the model, loss or data.
        WorkerError: a process died or raised.
    """
    if isinstance(plan, PlanResult):
        work, devices = plan.request.work, plan.request.cluster.num_devices
        options = {"global_batch": work.global_batch, **options}
        plan, processes = plan.runnable().text, processes or devices
    processes = processes or DEFAULT_PROCESSES
    job = job_of(Functions(build, loss, data), plan=plan, processes=processes, options=options)
    resume = options.get("resume", True)
    return run_job(job, model=f"as build() makes it, {job.steps} steps", resume=resume)


def job_of(
    functions: Functions,
    *,
    plan: str,
    processes: int,
    options: VerifyOptions,
    decide: Decide = decide_locally,
) -> VerifyJob:
    """The comparison that `verify` runs; raises as it does before any process trains."""
    config = _config_of_functions(plan, processes, options)
    if config.plan.mode == "auto":
        config = decided(config, decide(config, processes, functions))
    steps = options.get("steps", DEFAULT_STEPS)
    _check_steps(steps)
    return VerifyJob(
        config=config,
        plan=plan_of(config, world_size=processes),
        steps=steps,
        functions=functions,
        inject=options.get("inject"),
    )


def _config_of_functions(plan: str, processes: int, options: VerifyOptions) -> RunConfig:
    overrides = [*_plan_overrides(plan), f"plan.processes={processes}"]
    overrides.append(f"plan.precision={options.get('precision', 'fp64')}")
    overrides.append(f"train.optimizer.name={options.get('optimizer', 'adamw')}")
    overrides.append(f"train.clip_norm={float(options.get('clip_norm', 1.0))}")
    overrides.append(f"train.seed={options.get('seed', 0)}")
    overrides += layout_overrides(options.get("layout", {}).items())
    config = load_config(None, overrides).config
    micro = config.plan.micro_batch or _DEFAULT_MICRO_BATCH
    workers = num_workers_of(config, processes)
    batch = options.get("global_batch", workers * micro * _DEFAULT_MICROBATCHES)
    overrides.append(f"train.global_batch={batch}")
    if config.plan.micro_batch is None and "global_batch" not in options:
        overrides.append(f"plan.micro_batch={micro}")
    return load_config(None, [*overrides, *eps_override(config)]).config


def verify_source(source: str, options: SourceOptions) -> VerifyResult:
    """Compare what a run file, a `plan.lock.json` or a `py:module:function` describes.

    Args:
        source: `run.toml`, `py:module:function`, or a `plan.lock.json`: of a run folder, or of `meshwright plan`.
        options: see `SourceOptions`.

    Raises:
        MeshwrightError: as `verify`; E100 for a source that cannot be read.
    """
    path, overrides = read_source(source)
    return verify_loaded(lambda more: load_config(path, [*overrides, *more]), options)


def verify_loaded(load: Callable[[Sequence[str]], Resolved], options: SourceOptions) -> VerifyResult:
    """Compare a configuration, cut down where its model is a known architecture.

    Args:
        load: texts `a.b=c` -> the configuration with them.
        options: see `SourceOptions`.
    """
    _check_steps(options.steps)
    overrides = [*_plan_overrides(options.plan), f"plan.precision={options.precision}"]
    first = load(overrides).config
    if first.plan.lock is not None:
        overrides = [*keys_of_lock(first.plan.lock), *overrides]
        first = load(overrides).config
    processes = options.processes or _processes_of(first)
    overrides.append(f"plan.processes={processes}")
    cut = [] if options.full else cut_overrides(first, processes=num_workers_of(first, processes))
    resolved = load([*overrides, *cut, *eps_override(first)])
    return verify_config(
        resolved, processes=processes, steps=options.steps, is_cut=bool(cut), resume=options.resume
    )


def verify_config(
    resolved: Resolved, *, processes: int, steps: int, is_cut: bool, resume: bool
) -> VerifyResult:
    """Compare the run that `resolved` describes, as it stands.

    Args:
        resolved: the run.
        processes: candidate ranks.
        steps: optimizer steps to compare.
        is_cut: only said in the result.
        resume: whether another layout also goes on from a checkpoint of the candidate.
    """
    if resolved.config.plan.mode == "auto":
        resolved, _ = with_plan(resolved, processes=processes)
    config = resolved.config
    plan = plan_of(config, world_size=processes)
    name = config.model.source.removeprefix("preset:")
    if not config.model.source.startswith("preset:"):
        how = "as its function makes it" if name.startswith("py:") else "as it is configured"
        model = f"{name}, {how}, {steps} steps"
    elif is_cut:
        model = f"{name}, depth, width and vocab cut, same code path, {steps} steps   (--full: real size)"
    else:
        model = f"{name}, real size, {steps} steps"
    return run_job(VerifyJob(config=config, plan=plan, steps=steps), model=model, resume=resume)


def run_job(job: VerifyJob, *, model: str, resume: bool = True) -> VerifyResult:
    """Run the reference and the candidate of `job` on local processes and judge.

    Args:
        job: what to compare.
        model: words for the result.
        resume: whether another layout also goes on from a checkpoint of the candidate, if that is right.

    Raises:
        PlanError: E223 for an asynchronous plan.
    """
    if job.plan.staleness is not None:
        raise PlanError(
            "E223",
            f"plan.staleness = {job.plan.staleness}: an asynchronous run has another result each time, so there is no "
            f"reference to hold it against. Verify the plan without plan.staleness.",
        )
    started = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="meshwright-verify-"))
    handover = Handover(folder / "checkpoint", job.steps - 1) if resume else None
    try:
        target = partial(_reference, cloudpickle.dumps(job), folder / _TENSORS)
        reference: Reference = run_local(target, processes=1, run_dir=folder / "reference")[0]
        ranks = _measure(job, reference, folder, save=handover)
        result = result_of(job, reference, ranks, model=model, seconds=0.0)
        if handover is not None and result.ok:
            other = resumed_job(job)
            loaded = _measure(other, reference, folder, load=handover)
            check = resume_check(job, other, reference, loaded, after=handover.step)
            result = replace(result, checks=(*result.checks, check))
    except WorkerError:
        (folder / _TENSORS).unlink(missing_ok=True)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return replace(result, seconds=time.perf_counter() - started)


def _measure(
    job: VerifyJob,
    reference: Reference,
    folder: Path,
    *,
    save: Handover | None = None,
    load: Handover | None = None,
) -> list[RankReport]:
    """What the ranks of `job` measured, on local processes."""
    return run_local(
        partial(_candidate, cloudpickle.dumps(job), reference, folder / _TENSORS, (save, load)),
        processes=job.plan.world_size,
        run_dir=folder / ("candidate" if load is None else "resumed"),
    )


def result_of(
    job: VerifyJob, reference: Reference, ranks: Sequence[RankReport], *, model: str, seconds: float
) -> VerifyResult:
    """The judgement of what workers measured; `model` is words for the result."""
    precision = PRECISION_WORDS[job.plan.precision]
    if reference.asks_for_float32:
        precision += ", also where the model asks for float32"
    transport = ", ".join(sorted({report.transport for report in ranks}))
    sizes = Sizes(job.plan.mesh.dp, job.plan.num_microbatches, job.steps, job.plan.policy.name)
    return VerifyResult(
        checks=judge(reference, ranks, sizes),
        reference=f"one process, {precision}",
        candidate=f"{job.plan.describe()} on {job.plan.world_size} CPU processes ({transport})",
        model=model,
        seconds=seconds,
        peak_memory_bytes={
            "reference": reference.peak_memory_bytes,
            "candidate": sum(report.peak_memory_bytes for report in ranks),
        },
    )


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise ConfigError("E109", f"steps = {steps}: at least 1 step is compared, e.g. {DEFAULT_STEPS}")


def _plan_overrides(plan: str) -> list[str]:
    return [f"plan.{part}" for part in split_at_commas(plan)]


def _processes_of(config: RunConfig) -> int:
    given = config.plan.processes or config.plan.dp
    return local_world_size(config, num_gpus=0) if given else DEFAULT_PROCESSES


def _reference(call: bytes, path: Path, _world: World, _context: WorkerContext) -> Reference:
    """The target of the one worker that runs the reference."""
    # Imported here because it needs torch, which a launcher must not load.
    from meshwright.verification.reference import run_reference

    return run_reference(pickle.loads(call), path)


def _candidate(
    call: bytes,
    reference: Reference,
    path: Path,
    handovers: tuple[Handover | None, Handover | None],
    world: World,
    context: WorkerContext,
) -> RankReport:
    """The target of the candidate's workers."""
    # Imported here because it needs torch, which a launcher must not load.
    from meshwright.verification.candidate import run_candidate

    save, load = handovers
    job, run_dir = pickle.loads(call), context.run_dir
    return run_candidate(job, reference, path, world=world, run_dir=run_dir, save=save, load=load)
