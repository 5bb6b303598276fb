"""The shape of a transformer that is a module: sizes from its configuration, believed if its parameters agree.

Owns what counts as agreement. Names of sizes are those of `presets/hf_config.py`. Must not know what shapes are for.
Simplification: a module without a `config` has no shape; sizes are not guessed from its matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.presets.counts import num_parameters
from meshwright.presets.hf_config import shapes_of_config
from meshwright.presets.models import ModelPreset
from meshwright.training.config import RunConfig
from meshwright.training.hf import HfBuild
from meshwright.training.initialise import LeanBuild
from meshwright.training.task import call_user

# Biases, norms of queries and keys, padded vocabularies: vectors and rows beside the matrices.
_AGREES = 0.02
_FIX = 'plan="auto" in meshwright.train measures any model; or give the planner the nearest preset, or a config.json'


def shape_of_model(model: Any) -> ModelPreset:
    """The shape of a module, or of what a function makes.

    Args:
        model: a module, a function that makes one, a build of `meshwright.hf`, or what that returned.

    Raises:
        ConfigError: E111 for what is no model, E269 for one whose shape is not known, E106 for sizes that do not belong
            together.
    """
    module = _built(model)
    values = _values(getattr(module, "config", None))
    name = str(values.get("_name_or_path") or "") or type(module).__name__
    found = shapes_of_config(values, name)
    if not found:
        raise ConfigError(
            "E269",
            f"{name} has no shape that the planner knows: a transformer says layers, width, heads and vocabulary in "
            f"its `config` (as num_layers, dim, num_heads, vocab_size). {_FIX}",
        )
    numel = sum(parameter.numel() for parameter in module.parameters())
    nearest = min(found, key=lambda shape: abs(num_parameters(shape) - numel))
    if abs(num_parameters(nearest) / numel - 1) > _AGREES:
        raise ConfigError(
            "E269",
            f"{name} has {numel:,} parameters, and a {nearest.family} model of the sizes in its `config` has "
            f"{num_parameters(nearest):,}: it is built another way, so its price is not known. {_FIX}",
        )
    return nearest


def shape_of_config(config: RunConfig) -> ModelPreset:
    """The shape of the model that a run names; raises as `shape_of_model`, and what making it raises."""
    kind, _, place = config.model.source.partition(":")
    if kind == "py":
        return replace(shape_of_model(call_user(place)[0]), name=f"py:{place}")
    sizes = config.model.model_dump(exclude={"source", "init", "task"}, exclude_none=True)
    return shape_of_model(HfBuild(place, config.model.init, config.model.task, sizes))


def _built(model: Any) -> nn.Module:
    """A module, without memory if it can be."""
    if isinstance(model, tuple) and model:
        return _built(model[0])
    module = model
    if isinstance(model, LeanBuild):
        module = model.skeleton()
    elif callable(model) and not isinstance(model, nn.Module):
        with torch.device("meta"):
            module = model()
    if not isinstance(module, nn.Module):
        raise ConfigError(
            "E111",
            f"{type(module).__name__} is no model to plan for: give a torch.nn.Module, a function that makes one, what "
            f"meshwright.hf returned, or the name of a preset",
        )
    return module


def _values(config: Any) -> Mapping[str, object]:
    """A configuration of any kind as a table."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return config
    as_table = getattr(config, "to_dict", None)  # of transformers
    values: Mapping[str, object] = as_table() if callable(as_table) else vars(config)
    return values
