"""`meshwright.job()`: a user's own script as one rank, however it was started.

Owns the finding of the world and of the folders: one process, a worker of `meshwright train script.py -n 4`, of
torchrun or of SLURM. Knows nothing of what a job does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal, TypedDict, Unpack

from meshwright.comm.mesh import World, current_world
from meshwright.comm.watchdog import RunFiles
from meshwright.launching.jobs import RUN_DIR_VARIABLE, job_name, make_run_dir
from meshwright.launching.worker import enable_dumps
from meshwright.layout.plan import Precision
from meshwright.training.config import RunConfig, load_config
from meshwright.training.console import Console
from meshwright.training.job import Job
from meshwright.training.units import split_at_commas, toml_literal


class JobOptions(TypedDict, total=False):
    """What `job` may be told beside the plan's text.

    Keys:
        zero, hsdp, ownership, micro_batch, transport, precision: as the keys of `plan` in a run file.
        seed: of weights, sample order and dropout, default 0.
        deterministic: only kernels that give the same bits each time.
        clip_norm: largest gradient norm of each optimizer; default: no clipping.
        dropout: `stateless` (default) or `native`.
        watchdog: seconds without progress after which the job is ended, default 300.
        out: folder of `metrics.jsonl`; default `runs/<script>-NNNN`.
    """

    zero: Literal[0, 1, 2, 3]
    hsdp: int
    ownership: Literal["flat", "whole"]
    micro_batch: int
    transport: Literal["auto", "gloo", "shm", "nccl"]
    precision: Precision
    seed: int
    deterministic: bool
    clip_norm: float
    dropout: Literal["stateless", "native"]
    watchdog: float
    out: str | Path


def job(plan: str = "", **options: Unpack[JobOptions]) -> Job:
    """Connect this script's processes: `with meshwright.job("zero=3") as job:`.

    `python script.py` is one process; `meshwright train script.py -n 4`, torchrun and srun start several, and the
    script computes the same.

    Args:
        plan: keys of the run file's `plan` table: `zero=3,hsdp=2`.
        **options: see `JobOptions`.

    Returns:
        The job, a context manager: `build`, `optimizer`, `batches`, `log`.

    Raises:
        ConfigErrors: E101 unknown keys, E109 values, E110 what is not built.
    """
    config = _config(plan, options)
    world = current_world()
    files, run_dir = _folders(world, options.get("out"))
    console = Console(sys.stdout if world.rank == 0 else None)
    return Job(config, world, run_dir=run_dir, files=files, console=console)


def _config(plan: str, options: JobOptions) -> RunConfig:
    overrides = [f"plan.{part}" for part in split_at_commas(plan)]
    values: dict[str, object] = {"clip_norm": 0.0, **options}
    values.pop("out", None)
    for name, value in values.items():
        if name == "watchdog":
            overrides.append(f'train.watchdog="{value} s"')
        elif name in ("seed", "deterministic", "clip_norm", "dropout"):
            overrides.append(f"train.{name}={toml_literal(value)}")
        else:
            overrides.append(f"plan.{name}={toml_literal(value)}")
    return load_config(None, overrides).config


def _folders(world: World, out: str | Path | None) -> tuple[RunFiles, Path]:
    """Where failures are explained from, and where metrics go."""
    given = Path(out) if out is not None else None
    if RUN_DIR_VARIABLE in os.environ:  # our launcher reads its own folder when a rank has failed
        files = RunFiles(Path(os.environ[RUN_DIR_VARIABLE]))
        return files, given or files.root
    script = Path("runs") / (Path(sys.argv[0]).stem or "python")
    if world.size == 1:
        run_dir = given or make_run_dir(script)
    else:
        run_dir = given or script.with_name(f"{script.name}-{job_name(os.environ)}")
        enable_dumps(RunFiles(run_dir), world.rank)
    return RunFiles(run_dir), run_dir
