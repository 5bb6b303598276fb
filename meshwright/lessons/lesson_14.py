"""From a laptop to SLURM: one run file, four ways to start it, the same losses.

A run file says what is trained; who starts the processes is no part of it. `meshwright train` starts them itself on one
host. Under torchrun or srun each process is one already and reads who it is from its environment. A job script is text:
read it, then submit it. Here it runs to its end with a stand-in for `srun` that does what SLURM does to a task.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import indent

from meshwright.launching.launch import slurm
from meshwright.launching.ports import choose_port
from meshwright.lessons.pictures import bars

NUM_RANKS = 2
_RUN_FILE = """\
[model]
source = "preset:gpt-nano"
[data]
train = "stdlib"
seq_len = 64
[train]
global_batch = "8 sequences"
stop_at = "4 steps"
seed = 1
[plan]
zero = 1
[save]
every = "1000 steps"
"""
# What SLURM tells each task.
_SRUN = f"""\
#!/usr/bin/env bash
shift
export SLURM_JOB_ID=14 SLURM_NTASKS={NUM_RANKS} SLURM_STEP_NODELIST=localhost
for rank in $(seq 0 {NUM_RANKS - 1}); do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
    pids+=($!)
done
for pid in "${{pids[@]}}"; do wait "$pid" || exit 1; done
"""
# Not inside another job; the first arguments are a folder of programs and a free port.
_ALONE = 'unset ${!SLURM_@}; chmod +x srun; PATH=.:$1:$PATH MASTER_PORT=$2 exec "${@:3}"'


def main() -> None:
    """Run the lesson."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("run.toml").write_text(_RUN_FILE)
        Path("srun").write_text(_SRUN)
        script = slurm("run.toml", nodes=1, processes_per_node=NUM_RANKS, time="1:00:00").script
        Path("job.sh").write_text(script)
        print("1. One run file:\n\n" + indent(_RUN_FILE, "   "))
        print("2. What would be submitted (`meshwright launch slurm run.toml`):\n\n" + indent(script, "   "))
        print("3. Four ways to start it:\n")
        losses = {way: _losses(way, command) for way, command in ways().items()}
    picture = bars({way: found[-1] for way, found in losses.items()}, unit="loss", digits=4)
    print(f"\n{picture}\n\n{compare(losses)}")


def ways() -> dict[str, tuple[str, ...]]:
    """How a run is started: the command."""
    python, train = (sys.executable, "-m"), ("meshwright", "train", "run.toml")
    torchrun = ("torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}", "-m")
    return {
        "1 process": (*python, *train, "plan.processes=1"),
        f"{NUM_RANKS} processes": (*python, *train, f"plan.processes={NUM_RANKS}"),
        "torchrun": (*python, *torchrun, *train),
        "SLURM script": ("bash", "job.sh"),
    }


def _losses(way: str, command: tuple[str, ...]) -> list[float]:
    """The loss of each step of one way."""
    print(f"   {way:13} {' '.join(Path(part).name for part in command)}", flush=True)
    before = set(Path().glob("**/metrics.jsonl"))
    own = (str(Path(sys.executable).parent), str(choose_port(None)), *command)
    done = subprocess.run(("bash", "-c", _ALONE, "_", *own), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (written,) = set(Path().glob("**/metrics.jsonl")) - before
    return [json.loads(line)["loss"] for line in written.read_text().splitlines() if '"loss"' in line]


def compare(losses: dict[str, list[float]]) -> str:
    """The verdict: with as many ranks the same bits, with another number the same but for rounding."""
    one, *several = losses.values()
    assert all(other == several[0] for other in several), "the same ranks, started differently, differ"
    worst = max(abs(a - b) / a for a, b in zip(one, several[0], strict=True))
    assert worst < 1e-5, f"1 and {NUM_RANKS} processes differ by {worst:.1e}"
    same = f"   ✓ {len(several)} ways to start {NUM_RANKS} ranks: equal to the last bit in {len(one)} steps"
    return f"{same}\n   ✓ 1 process: equal but for the order of sums, worst {worst:.1e}"
