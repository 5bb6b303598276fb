"""A shell script for hosts that are reached by ssh: torchrun on each, meeting on the first.

torchrun's agents start the processes and, when one dies, all of them again from the newest checkpoint. The script ends
all hosts when one of them fails or when it is interrupted.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from meshwright.launching.scripts.request import JobRequest


def ssh_script(job: JobRequest, hosts: Sequence[str], *, port: int, python: str, interface: str) -> str:
    """The text of the script, for `bash`.

    Args:
        job: its command is a Python module and its arguments.
        hosts: names that ssh knows; the first must be reachable from the others by the same name.
        port: of the meeting on the first host.
        python: the interpreter on every host.
        interface: network interface for CPU processes and NCCL's bootstrap; empty: found by itself.
    """
    gloo = f"GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface} " if interface else ""
    quoted = " ".join(shlex.quote(host) for host in hosts)
    endpoint = f"{hosts[0].rpartition('@')[2]}:{port}"
    run = (
        f"cd {shlex.quote(job.folder)} && {gloo}exec {shlex.quote(python)} -m torch.distributed.run "
        f"--nnodes={job.nodes} --nproc-per-node={job.per_node} --max-restarts={job.restarts} "
        f"--rdzv-backend=c10d --rdzv-endpoint={endpoint} --rdzv-id=$RUN_ID "
        f"--rdzv-conf=is_host=$IS_HOST,read_timeout=300 -m {job.command_line}"
    )
    return f"""\
#!/usr/bin/env bash
set -euo pipefail
hosts=({quoted})
# One number a launch: a second run of this script is another job; restarted workers keep it, and so their run folder.
run_id={job.name}-${{MESHWRIGHT_RUN_ID:-$(date +%Y%m%d-%H%M%S)}}
run={shlex.quote(run)}

pids=()
stop() {{
    trap '' INT TERM
    for pid in "${{pids[@]}}"; do kill -TERM "$pid" 2>/dev/null || true; done
    wait || true
}}
trap 'stop; exit 130' INT TERM

is_host=1  # said aloud: a host does not know itself by every name and address that it has
for host in "${{hosts[@]}}"; do
    command="${{run//\\$RUN_ID/$run_id}}"
    # -tt: what runs there ends with this connection.
    ssh -tt -o BatchMode=yes "$host" "${{command//\\$IS_HOST/$is_host}}" </dev/null &
    is_host=0
    pids+=($!)
done

code=0
for _ in "${{pids[@]}}"; do
    wait -n || {{ code=$?; break; }}
done
stop
exit "$code"
"""
