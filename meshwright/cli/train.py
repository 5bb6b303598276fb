"""`meshwright train`: a run file through the launcher, or a user's own script on local ranks.

Owns the arguments of the verb. Knows nothing of processes or of training: the launcher does both.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.output import print_json, stdout_to_stderr
from meshwright.errors import EXIT_INTERRUPTED, ConfigError

INSTALL_TORCH = (
    'train needs PyTorch: pip install "meshwright[train]"  (CPU only, ≈ 0.2 GB: add '
    "--extra-index-url https://download.pytorch.org/whl/cpu; the default Linux wheels are ≈ 3 GB)"
)


def train(
    target: Annotated[str, typer.Argument(help="A run file (.toml) or your own script (.py).")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="a.b=c for a run file; the script's own arguments.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option("-n", "--processes", min=1, help="Local processes (plan.processes).")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="auto, a run folder or a checkpoint: go on from there.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Train from a run file, or run your script."""
    kind = Path(target).suffix
    if kind not in (".toml", ".py"):
        raise ConfigError("E100", f"{target!r} is neither a run file (.toml) nor a script (.py)")
    if kind == ".toml":
        _train_config(
            Path(target), arguments or [], processes=processes, resume=resume, json_output=json_output
        )
    elif resume is not None:
        raise ConfigError(
            "E100", f"--resume {resume}: a script resumes by itself; --resume is for run files (.toml)"
        )
    else:
        _train_script(Path(target), arguments or [], processes=processes or 1, json_output=json_output)


def require_torch() -> None:
    """E001 where torch is not installed, without importing it."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("E001", INSTALL_TORCH)


def _train_config(
    path: Path, arguments: list[str], *, processes: int | None, resume: str | None, json_output: bool
) -> None:
    from meshwright.training.config import load_config

    if processes is not None:
        arguments = [*arguments, f"plan.processes={processes}"]
    resolved = load_config(path, arguments)
    for warning in resolved.warnings:
        typer.echo(warning, err=True)
    require_torch()
    from meshwright.launching import launch_config

    with stdout_to_stderr(active=json_output):
        result = launch_config(resolved, json_output=json_output, resume=resume)
    # Under torchrun or SLURM every rank runs this command, and only rank 0 has a result.
    if json_output and result:
        print_json(result)
    if result.get("interrupted"):
        raise typer.Exit(EXIT_INTERRUPTED)


def _train_script(path: Path, arguments: list[str], *, processes: int, json_output: bool) -> None:
    if not path.is_file():
        raise ConfigError("E100", f"cannot read {str(path)!r}: no such file. Working directory: {Path.cwd()}")
    require_torch()
    from meshwright.launching import launch_script

    with stdout_to_stderr(active=json_output):
        code = launch_script(path, processes=processes, arguments=arguments)
    if json_output:
        print_json({"script": str(path), "processes": processes, "exit_code": code})
    raise typer.Exit(code)
