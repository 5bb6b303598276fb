"""`meshwright launch slurm|ssh`: print the job script of a run on several hosts.

Owns the options. The scripts stand in `launching/scripts/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.output import print_json
from meshwright.errors import writing
from meshwright.launching.launch import DEFAULT_PORT, DEFAULT_RESTARTS, Job
from meshwright.launching.launch import slurm as slurm_job
from meshwright.launching.launch import ssh as ssh_job

app = typer.Typer(help="Print the job script of a run on several hosts.", no_args_is_help=True)

_RunFile = Annotated[Path, typer.Argument(help="A run file (.toml), at this path on every host.")]
_Overrides = Annotated[list[str] | None, typer.Argument(help="a.b=c")]
_Gpus = Annotated[int, typer.Option(min=0, help="GPUs of a host, one process each; 0: CPU processes.")]
_Processes = Annotated[int, typer.Option(min=0, help="CPU processes of a host without GPUs.")]
_Restarts = Annotated[int, typer.Option(min=0, help="How often a failed run starts again.")]
_Out = Annotated[Path | None, typer.Option(help="Write the script here instead of printing it.")]
_Submit = Annotated[bool, typer.Option("--submit", help="Hand it to the launcher at once.")]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command(name="slurm")
def slurm(  # noqa: PLR0913 - each is an option of the command
    run_file: _RunFile,
    overrides: _Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts.")] = 1,
    gpus_per_node: _Gpus = 0,
    processes_per_node: _Processes = 0,
    time: Annotated[str, typer.Option(help="Limit, e.g. 24:00:00.")] = "",
    partition: Annotated[str, typer.Option(help="Where to queue.")] = "",
    account: Annotated[str, typer.Option(help="Who pays.")] = "",
    cpus_per_task: Annotated[int | None, typer.Option(min=1, help="Cores of a process.")] = None,
    requeue: Annotated[bool, typer.Option(help="Queue again at the time limit.")] = True,
    restarts: _Restarts = DEFAULT_RESTARTS,
    out: _Out = None,
    submit: _Submit = False,
    json_output: _Json = False,
) -> None:
    """A batch script for sbatch."""
    job = slurm_job(
        run_file,
        *(overrides or []),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        processes_per_node=processes_per_node,
        restarts=restarts,
        time=time,
        partition=partition,
        account=account,
        cpus_per_task=cpus_per_task,
        requeue=requeue,
    )
    _finish(job, out, submit=submit, json_output=json_output)


@app.command(name="ssh")
def ssh(  # noqa: PLR0913 - each is an option of the command
    run_file: _RunFile,
    overrides: _Overrides = None,
    hosts: Annotated[str, typer.Option(help="Names that ssh knows, separated by commas.")] = "localhost",
    gpus_per_node: _Gpus = 0,
    processes_per_node: _Processes = 0,
    port: Annotated[int, typer.Option(help="Where the hosts meet on the first.")] = DEFAULT_PORT,
    python: Annotated[str, typer.Option(help="The interpreter on every host.")] = "python3",
    interface: Annotated[str, typer.Option(help="Network interface between hosts, e.g. eth0.")] = "",
    restarts: _Restarts = DEFAULT_RESTARTS,
    out: _Out = None,
    submit: _Submit = False,
    json_output: _Json = False,
) -> None:
    """A shell script that runs torchrun on every host."""
    job = ssh_job(
        run_file,
        *(overrides or []),
        hosts=[host.strip() for host in hosts.split(",") if host.strip()],
        gpus_per_node=gpus_per_node,
        processes_per_node=processes_per_node,
        restarts=restarts,
        port=port,
        python=python,
        interface=interface,
    )
    _finish(job, out, submit=submit, json_output=json_output)


def _finish(job: Job, out: Path | None, *, submit: bool, json_output: bool) -> None:
    if out is not None:
        with writing(out):
            out.write_text(job.script, encoding="utf-8")
    answer = job.submit() if submit else None
    if json_output:
        print_json({"script": job.script, "out": None if out is None else str(out), "submitted": answer})
    elif answer is not None:
        print(answer)
    else:
        print(job.script if out is None else f"wrote {out}", end="" if out is None else "\n")
