"""A batch script for SLURM: one task a device, restarted from the newest checkpoint.

`srun` starts the processes, which read SLURM's own variables: no torchrun, no rendezvous, a port from the job's number.
A run that fails is started again inside the allocation; errors of the configuration (exit codes 2 and 3) are not. Two
minutes before the time limit every task gets SIGTERM, and the job goes back into the queue with its number, so with its
run folder; what is lost are the steps since the newest checkpoint (`save.every`).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from meshwright.launching.scripts.request import JobRequest

_WARNING_SECONDS = 120


@dataclass(frozen=True)
class SlurmOptions:
    """What only SLURM asks for; empty texts leave a line out.

    Attributes:
        time: limit, e.g. `24:00:00`.
        partition: where to queue.
        account: who pays.
        cpus_per_task: cores of each process.
        requeue: whether the job queues again at its time limit or when it is preempted.
    """

    time: str = ""
    partition: str = ""
    account: str = ""
    cpus_per_task: int | None = None
    requeue: bool = True


def slurm_script(job: JobRequest, options: SlurmOptions) -> str:
    """The text of the script, for `sbatch`."""
    directives = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.per_node,
        "gpus-per-node": job.per_node if job.gpus else None,
        "cpus-per-task": options.cpus_per_task,
        "time": options.time or None,
        "partition": options.partition or None,
        "account": options.account or None,
        "chdir": job.folder,
        "output": f"{job.name}-%j.log",
        "open-mode": "append",
        "signal": f"B:TERM@{_WARNING_SECONDS}",
    }
    lines = [
        f"#SBATCH --{key}={shlex.quote(str(value))}" for key, value in directives.items() if value is not None
    ]
    lines.append("#SBATCH --requeue" if options.requeue else "#SBATCH --no-requeue")
    header = "\n".join(lines)
    again = 'scontrol requeue "$SLURM_JOB_ID"' if options.requeue else "true"
    return f"""\
#!/usr/bin/env bash
{header}
set -euo pipefail
# As torchrun: one thread a rank, or as many as cores were asked for. Sums of other numbers of threads round otherwise.
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}"

stop() {{  # the time limit is near: ranks of a run that saves do so and stop; queue again
    trap '' TERM
    kill -TERM "$step" 2>/dev/null || true
    wait "$step" || true
    {again}
    exit 0
}}
trap stop TERM

for attempt in $(seq 0 {job.restarts}); do
    srun --kill-on-bad-exit=1 {job.command_line} &
    step=$!
    code=0
    wait "$step" || code=$?
    case "$code" in
        0 | 2 | 3) exit "$code" ;;  # done, or a configuration that another start would not mend
    esac
    echo "attempt $attempt of {job.name} ended with code $code" >&2
done
exit "$code"
"""
