"""Starting workers: local processes, a user's script on local ranks, or this process as torchrun's or SLURM's."""

from meshwright.launching.from_python import train
from meshwright.launching.jobs import launch_config, launch_script
from meshwright.launching.local import run_local
from meshwright.launching.messages import WorkerContext

__all__ = ["WorkerContext", "launch_config", "launch_script", "run_local", "train"]
