"""Programs named srun, scontrol, sbatch and ssh that do on this host what the real ones do on a cluster."""

from __future__ import annotations

from pathlib import Path

# Starts the step's tasks with SLURM's variables and ends all when one fails; on the first attempt it kills the last
# task once there is a checkpoint.
_SRUN = """\
#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
echo srun >> "$FAKE_DIR/calls"
pids=()
end() { kill -TERM "${pids[@]}" 2>/dev/null; wait; exit 143; }
trap end TERM
for ((i = 0; i < FAKE_TASKS; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NTASKS=$FAKE_TASKS SLURM_STEP_NODELIST=localhost \\
        MASTER_PORT=$FAKE_PORT "$@" &
    pids+=($!)
done
if [[ $FAKE_KILL == 1 && $(wc -l < "$FAKE_DIR/calls") == 1 ]]; then
    until compgen -G "$FAKE_DIR/run/ckpt/step-*/manifest.json" > /dev/null; do sleep 0.05; done
    kill -KILL "${pids[-1]}"
fi
code=0
for _ in "${pids[@]}"; do
    wait -n || { code=$?; kill -TERM "${pids[@]}" 2>/dev/null; }
done
exit "$code"
"""
_SCONTROL = '#!/usr/bin/env bash\necho "scontrol $*" >> "$FAKE_DIR/calls"\n'
_SBATCH = '#!/usr/bin/env bash\ncp "$1" "$FAKE_DIR/submitted.sh"\necho "Submitted batch job 4711"\n'
_SSH = """\
#!/usr/bin/env bash
while [[ "$1" == -* ]]; do [[ "$1" == -o ]] && shift; shift; done
echo "ssh $1" >> "$FAKE_DIR/calls"
shift
exec bash -c "$*"
"""


def make_programs(folder: Path, *names: str) -> Path:
    """A folder for PATH with the named programs."""
    programs = {"srun": _SRUN, "scontrol": _SCONTROL, "sbatch": _SBATCH, "ssh": _SSH}
    folder.mkdir()
    for name in names:
        path = folder / name
        path.write_text(programs[name])
        path.chmod(0o755)
    return folder
