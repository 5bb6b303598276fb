"""Meshwright trains large models on many devices; the result never depends on how the mesh is factored.

Names of this module are imported on first use, so that planning and the command line start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "Job": "meshwright.training.job",
    "MeshSpec": "meshwright.mesh",
    "RunConfig": "meshwright.training.config",
    "ShardedModel": "meshwright.training.own_loop",
    "TrainPlan": "meshwright.layout.plan",
    "hf": "meshwright.training.hf",
    "job": "meshwright.launching.own_script",
    "plan": "meshwright.launching.plan",
    "train": "meshwright.launching",
    "verify": "meshwright.launching.verify",
}
__all__ = [
    "Job",
    "MeshSpec",
    "RunConfig",
    "ShardedModel",
    "TrainPlan",
    "__version__",
    "hf",
    "job",
    "launch",
    "plan",
    "train",
    "verify",
]

# Modules of functions: `meshwright.launch.slurm(...)`.
_MODULES = {"launch": "meshwright.launching.launch"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
