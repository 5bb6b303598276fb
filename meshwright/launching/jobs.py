"""The two things that are launched: a run of a configuration, and a user's own script.

Owns the choice between starting workers here and being one already (torchrun, SLURM), and the run folder's
name. Knows nothing of how workers are kept or of what training does.
"""

from __future__ import annotations

import os
import pickle
import re
import runpy
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from meshwright.checkpoint.folder import ResumeFrom, find_checkpoints, run_of
from meshwright.errors import EXIT_OK, CheckpointError
from meshwright.launching.deciding import with_plan
from meshwright.launching.local import run_local
from meshwright.launching.messages import WorkerContext
from meshwright.launching.planned import NOTHING_GIVEN, FromPython, Planned, cache_of, planned
from meshwright.launching.recording import lines_of, recorded
from meshwright.training.config import DEFAULT, Resolved, RunConfig
from meshwright.training.console import Console
from meshwright.training.planning import local_world_size, plan_of
from meshwright.verification.job import Functions

if TYPE_CHECKING:
    from meshwright.comm.mesh import World

# Tells a script on our ranks where its launcher looks when one of them fails.
RUN_DIR_VARIABLE = "MESHWRIGHT_RUN_DIR"


def launch_config(
    resolved: Resolved,
    *,
    json_output: bool,
    resume: str | None = None,
    functions: Functions | None = None,
    plan: Planned | None = None,
) -> dict[str, Any]:
    """Train what `resolved` says: on local workers, or in this process if a launcher started it as a worker.

    Args:
        resolved: the configuration.
        json_output: write lines for people to standard error.
        resume: `auto`, or a run folder or checkpoint to go on from; None: a fresh start.
        functions: the model, loss and data where they are Python objects.
        plan: what `plan_of_run` made of the configuration before; None: it is asked now.

    Returns:
        Rank 0's result; an empty dict on the other ranks of torchrun or SLURM.

    Raises:
        MeshwrightError: see `run_local`, and what training raises.
    """
    worker = is_worker(os.environ)
    if plan is None:  # of a model that is a Python object the planner knows no shape
        plan = plan_of_run(resolved) if functions is None else Planned(resolved)
    resolved, found = plan.resolved, plan
    for line in found.lines:
        print(line, file=sys.stderr if json_output else sys.stdout)
    if not worker:
        processes = local_world_size(resolved.config, num_gpus=num_gpus(os.environ))
        if resolved.config.plan.mode == "auto":
            place = _resumed_place(resolved, resume, worker=False)
            resolved, lines = with_plan(resolved, processes=processes, place=place, functions=functions)
            for line in lines:
                print(line, file=sys.stderr if json_output else sys.stdout)
        plan_of(resolved.config, world_size=processes)  # a plan that cannot run starts no process
    run_dir, resume_from = _run_dir(resolved, resume, worker=worker)
    call = None if functions is None else cloudpickle.dumps(functions)
    if worker:
        result = _train_here(resolved.config, call, run_dir, resume_from, json_output=json_output)
        return _recorded(result, found, json_output=json_output)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "resolved.toml").write_text(resolved.as_toml())
    target = partial(_train, resolved.config, call, json_output, resume_from)
    result = run_local(target, processes=processes, run_dir=run_dir)[0]
    return _recorded(result, found, json_output=json_output)


def plan_of_run(resolved: Resolved, given: FromPython = NOTHING_GIVEN) -> Planned:
    """The configuration with the plan of a file, a script or the planner, as it would run here; see `planned`."""
    size = _world_size(os.environ) if is_worker(os.environ) else None
    return planned(resolved, world_size=size, num_gpus=num_gpus(os.environ), given=given)


def _recorded(result: dict[str, Any], plan: Planned, *, json_output: bool) -> dict[str, Any]:
    """The result with what was predicted, which is printed; on other ranks than the first there is none."""
    if not result:
        return result
    whole = recorded(result, plan, cache=cache_of(plan.resolved))
    for line in lines_of(whole):
        print(line, file=sys.stderr if json_output else sys.stdout)
    return whole


def _run_dir(resolved: Resolved, resume: str | None, *, worker: bool) -> tuple[Path, ResumeFrom | None]:
    """The run folder, and where to look for a checkpoint.

    Without `save.dir` a resumed run goes on in the folder of the checkpoint, and `auto` means the newest numbered
    folder that has one (of torchrun's or SLURM's workers: the folder of their job).

    Raises:
        CheckpointError: E503 where a given place has no checkpoint.
    """
    name = resolved.config.save.dir
    numbered = resolved.origins["save.dir"] == DEFAULT
    if resume not in (None, "auto"):
        place = Path(resume)
        if not find_checkpoints(place):
            raise CheckpointError(
                "E503",
                f"--resume {resume}: there is no checkpoint. Give a run folder, or one checkpoint of it "
                f"(ckpt/step-NNNNNNNN), or auto; runs write them where save.every is set.",
            )
        own = run_of(place) if numbered else name
        return own or _new_dir(name, worker=worker), ResumeFrom(place, required=True)
    if numbered and (worker or resume is None):
        own = _new_dir(name, worker=worker)
    elif numbered:
        own = _resumed_place(resolved, resume, worker=worker) or make_run_dir(name)
    else:
        own = name
    return own, ResumeFrom(own, required=False) if resume else None


def _resumed_place(resolved: Resolved, resume: str | None, *, worker: bool) -> Path | None:
    """Where a resumed run looks for its checkpoint; None for a fresh start."""
    name = resolved.config.save.dir
    if resume is None:
        return None
    if resume != "auto":
        return Path(resume)
    if resolved.origins["save.dir"] != DEFAULT:
        return name
    if worker:
        return _new_dir(name, worker=True)
    return next((path for path in _numbered(name) if find_checkpoints(path)), None)


def _new_dir(name: Path, *, worker: bool) -> Path:
    return name.with_name(f"{name.name}-{job_name(os.environ)}") if worker else make_run_dir(name)


def launch_script(path: Path, *, processes: int, arguments: list[str]) -> int:
    """Run a Python script as `__main__` on local ranks with torchrun's environment; returns the exit code 0.

    Rank 0 keeps the terminal, the others write to logs in `runs/<script>-NNNN`. Where a launcher has already
    started this process as a worker, the script runs in it.

    Raises:
        MeshwrightError: see `run_local`.
    """
    target = partial(_run_script, path.resolve(), arguments)
    if is_worker(os.environ):
        target(None, None)
        return EXIT_OK
    run_dir = make_run_dir(Path("runs") / path.stem)
    run_local(target, processes=processes, run_dir=run_dir, keep_terminal=True)
    return EXIT_OK


def is_worker(environment: Mapping[str, str]) -> bool:
    """Whether torchrun or srun started this process as one of several.

    A batch script's own shell has SLURM_PROCID too, but no step.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return True
    several = int(environment.get("SLURM_NTASKS", "1")) > 1
    return several and "SLURM_PROCID" in environment and "SLURM_STEP_NODELIST" in environment


def _world_size(environment: Mapping[str, str]) -> int:
    """Of a worker."""
    return int(environment.get("WORLD_SIZE") or environment["SLURM_NTASKS"])


def job_name(environment: Mapping[str, str]) -> str:
    """What all workers of one torchrun or SLURM job call it without asking each other; attempts share it."""
    if "SLURM_JOB_ID" in environment:
        return f"job{environment['SLURM_JOB_ID']}"
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    named = run if run != "none" else f"port{environment.get('MASTER_PORT', '29500')}"
    return re.sub(r"[^\w.-]+", "_", named)


def make_run_dir(prefix: Path) -> Path:
    """Create `<prefix>-NNNN` with the next free number."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    taken = _numbered(prefix)
    number = int(taken[0].name.rpartition("-")[2]) + 1 if taken else 1
    while True:
        try:
            path = prefix.with_name(f"{prefix.name}-{number:04d}")
            path.mkdir()
        except FileExistsError:
            number += 1  # another run was faster
        else:
            return path


def _numbered(prefix: Path) -> list[Path]:
    """Folders `<prefix>-NNNN`, the highest number first."""
    pattern = re.compile(re.escape(prefix.name) + r"-(\d{4,})")
    if not prefix.parent.is_dir():
        return []
    found = {path: match for path in prefix.parent.iterdir() if (match := pattern.fullmatch(path.name))}
    return sorted(found, key=lambda path: int(found[path][1]), reverse=True)


def num_gpus(environment: Mapping[str, str]) -> int:
    """NVIDIA GPUs that workers would see, without asking torch."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    present = sum(1 for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())
    if visible is None or present == 0:
        return present
    return len([part for part in visible.split(",") if part.strip() and part.strip() != "-1"])


def _train(
    config: RunConfig,
    call: bytes | None,
    json_output: bool,
    resume: ResumeFrom | None,
    world: World,
    context: WorkerContext,
) -> dict[str, Any]:
    """The target of local workers."""
    descriptor = context.error_fd if json_output else context.output_fd
    stream = None if descriptor is None else open(descriptor, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
    return _run_worker(config, call, world, context.run_dir, Console(stream), resume)


def _train_here(
    config: RunConfig, call: bytes | None, run_dir: Path, resume: ResumeFrom | None, *, json_output: bool
) -> dict[str, Any]:
    # Imported here, for they need torch: a launcher must not load it, and only this process is a worker.
    from meshwright.comm.mesh import current_world
    from meshwright.launching.worker import enable_dumps

    world = current_world()
    context = WorkerContext(world.rank, run_dir)
    enable_dumps(context.files, world.rank)
    stream = (sys.stderr if json_output else sys.stdout) if world.rank == 0 else None
    asked: list[int] = []
    if config.save.every is not None:  # else there is nothing that the time before SIGKILL is good for
        signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    result = _run_worker(config, call, world, run_dir, Console(stream), resume, lambda: bool(asked))
    return result if world.rank == 0 else {}


def _run_worker(
    config: RunConfig,
    call: bytes | None,
    world: World,
    run_dir: Path,
    console: Console,
    resume: ResumeFrom | None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    # Imported here because it needs torch, which a launcher must not load.
    from meshwright.training.loop import run_worker

    task = None
    if call is not None:
        from meshwright.verification.subject import make_task_of

        task = partial(make_task_of, functions=pickle.loads(call), with_flops=True)
    try:
        return run_worker(
            config, world=world, run_dir=run_dir, console=console, resume=resume, stop=stop, make=task
        )
    finally:
        console.close()


def _run_script(
    path: Path, arguments: list[str], _world: World | None, context: WorkerContext | None
) -> None:
    if context is not None:
        os.environ[RUN_DIR_VARIABLE] = str(context.run_dir)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
