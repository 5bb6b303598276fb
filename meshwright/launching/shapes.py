"""The shape of a model that only Python knows, for the planner.

Owns where it is looked at: an object here, as whoever has one has torch; what a run file names in a process of its own,
for a launcher must not load torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.launching.local import run_local
from meshwright.launching.messages import WorkerContext
from meshwright.presets.models import ModelPreset
from meshwright.training.config import RunConfig

if TYPE_CHECKING:
    from meshwright.comm.mesh import World


def shape_of_object(model: tuple[Any, ...] | Callable[..., Any]) -> ModelPreset:
    """The shape of a module, of what a function makes, or of what `meshwright.hf` returned.

    Raises:
        ConfigError: E111 for what is no model, E269 for one whose shape is not known, E106.
    """
    from meshwright.training.shape import shape_of_model  # needs torch

    return shape_of_model(model)


def shape_of_run(config: RunConfig, *, here: bool = False) -> ModelPreset | None:
    """The shape of a run's model where the planner cannot read it: `py:` models, and `hf:` ones of the local cache.

    Args:
        config: of the run.
        here: look in this process, which is a worker.

    Returns:
        None where `planner/asking.py` reads it.

    Raises:
        MeshwrightError: as `shape_of_object`, and what making the model raises.
    """
    kind, _, place = config.model.source.partition(":")
    if kind == "preset" or (kind == "hf" and Path(place).exists()):
        return None
    if here:
        return _shape(config)
    with tempfile.TemporaryDirectory(prefix="meshwright-shape-") as folder:
        found = run_local(partial(_shape_on_rank, config), processes=1, run_dir=Path(folder))
    shape: ModelPreset = found[0]
    return shape


def _shape(config: RunConfig) -> ModelPreset:
    from meshwright.training.shape import shape_of_config  # needs torch

    return shape_of_config(config)


def _shape_on_rank(config: RunConfig, _world: World, _context: WorkerContext) -> ModelPreset:
    """The target of the one worker."""
    return _shape(config)
