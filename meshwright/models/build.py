"""From a family's name and plain numbers to a module.

Owns the list of families that can be trained. Knows no preset: whoever has one passes its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from torch import nn

from meshwright.models.gpt import GPT, GPTConfig
from meshwright.models.llama import Llama, LlamaConfig
from meshwright.models.mlp import MLP, MLPConfig

_FAMILIES: Mapping[str, tuple[type[Any], type[nn.Module]]] = MappingProxyType(
    {"gpt": (GPTConfig, GPT), "llama": (LlamaConfig, Llama), "mlp": (MLPConfig, MLP)}
)


def build_model(family: str, numbers: Mapping[str, Any]) -> nn.Module:
    """A model of `family` on torch's current default device (meta works too).

    Its values are torch's own; `initialise` gives them ours.

    Args:
        family: gpt, llama or mlp.
        numbers: the fields of the family's config by name, e.g. a preset as a dict; others are left aside.

    Raises:
        ValueError: the family has no module, or the sizes do not fit together.
    """
    if family not in _FAMILIES:
        raise ValueError(f"no module is built for the family {family!r}; trainable: {', '.join(_FAMILIES)}")
    config_type, model_type = _FAMILIES[family]
    known = {field.name for field in fields(config_type)}
    return model_type(config_type(**{key: value for key, value in numbers.items() if key in known}))
