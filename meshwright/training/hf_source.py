"""Where a Hugging Face model comes from: a folder, the local cache or a bare name; its configuration and its class.

Owns finding and changing the configuration, and the choice of the stock class for a task. Must not know data, losses or
the engine. Nothing is ever downloaded, and no code that lies beside a model is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn

from meshwright.data.hub import local_folder
from meshwright.errors import ConfigError

# A task's table of classes in transformers. The first that fits is taken where neither config.json nor the user says.
_MAPPINGS: Mapping[str, str] = MappingProxyType(
    {
        "image_classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
        "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING",
        "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING",
        "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    }
)
# Our names of sizes and theirs; a configuration may have a name of its own, which its `attribute_map` tells.
_SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "num_layers": ("num_hidden_layers",),
        "dim": ("hidden_size",),
        "num_heads": ("num_attention_heads",),
        "num_kv_heads": ("num_key_value_heads",),
        "ffn_dim": ("intermediate_size", "n_inner"),
        "vocab_size": ("vocab_size",),
        "max_seq_len": ("max_position_embeddings",),
        "num_labels": ("num_labels",),
    }
)
# Sizes that follow from the others where nobody says otherwise.
_DERIVED = frozenset({"head_dim", "num_key_value_heads"})


@dataclass(frozen=True)
class HfSource:
    """One model of transformers, found but not built.

    Attributes:
        place: as the user wrote it, without `hf:`.
        folder: where config.json and the weights lie; None for a bare name.
        config: transformers' configuration, changed.
        task: causal_lm, masked_lm, sequence_classification or image_classification.
        model_class: the stock class.
    """

    place: str
    folder: Path | None
    config: Any
    task: str
    model_class: type[nn.Module]

    def size(self, name: str) -> int | None:
        """The size that `model.NAME` sets, or None where this configuration has no such number."""
        key = _config_key(self.config, name)
        value = getattr(self.config, key) if key else None
        return int(value) if value is not None else None

    def build(self, device: str = "cpu") -> nn.Module:
        """The model in float32 on `device`; with torch's current seed, or on meta without values.

        Raises:
            ConfigError: E106 where the sizes do not fit together.
        """
        try:
            with torch.device(device):
                return self.model_class(self.config)
        except (ValueError, RuntimeError, AssertionError, ZeroDivisionError) as error:
            raise ConfigError(
                "E106", f"model hf:{self.place} ({self.model_class.__name__}): {error}"
            ) from error


def find_source(place: str, *, task: str | None = None, sizes: Mapping[str, int] | None = None) -> HfSource:
    """The configuration and class behind `hf:PLACE`.

    Args:
        place: a folder with config.json, an id that lies in the local cache, or a model type such as `llama`.
        task: see `HfSource`; None: from the configuration's architectures, else the first that transformers has.
        sizes: our names of sizes to values, put into the configuration.

    Raises:
        ConfigError: E115 without transformers, E120 where nothing is found or it has no class, E106 for a size that
            the configuration does not have.
    """
    transformers = import_transformers()
    folder = find_folder(place)
    config = _read_config(transformers, place, folder)
    if sizes:
        config = _with_sizes(config, sizes, place)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            "E120", f"hf:{place} is an encoder-decoder model; trainable tasks: {', '.join(_MAPPINGS)}"
        )
    if getattr(config, "problem_type", None) not in (None, "single_label_classification"):
        raise ConfigError(
            "E120",
            f"hf:{place} has problem_type = {config.problem_type!r}; trained is single_label_classification. "
            f'Change it in config.json, or bring your own loss with model.source = "py:MODULE:FUNCTION".',
        )
    chosen, model_class = _choose_class(transformers, place, config, task)
    return HfSource(place, folder, config, chosen, model_class)


def import_transformers() -> ModuleType:
    """The package, which takes seconds to import and only such runs need.

    Raises:
        ConfigError: E115 where it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "E115",
            'model.source = "hf:..." needs transformers, which is not installed: pip install "meshwright[hf]"',
        ) from error
    return transformers


def file_renaming(model: Any) -> Callable[[str], str]:
    """Name of a tensor in files of any version to the name that the class of `model` has for it today."""
    # Not of the documented API, and the only place where transformers keeps these names; a test guards it.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    rows = [row for row in get_model_conversion_mapping(model) if isinstance(row, WeightRenaming)]

    def rename(name: str) -> str:
        for row in rows:
            name = row.rename_source_key(name)[0]
        return name

    return rename


def find_folder(place: str) -> Path | None:
    """The folder of `place`: itself, or its snapshot in the local cache; None for the bare name of a model type.

    Raises:
        ConfigError: E120 where a path or an id is not there, with the command that fetches an id.
    """
    folder = local_folder(place, "config.json")
    if folder is not None:
        return folder
    path = Path(place).expanduser()
    if path.is_dir():
        raise ConfigError(
            "E120", f"hf:{place}: {path.absolute()} holds no config.json; give a model's folder"
        )
    transformers = import_transformers()
    if place in transformers.CONFIG_MAPPING:
        return None
    if place.startswith((".", "/", "~")) or place.count("/") > 1:
        raise ConfigError(
            "E120", f"hf:{place}: {path.absolute()} does not exist; give a folder with config.json"
        )
    raise ConfigError(
        "E120",
        f"hf:{place} is no folder, no model type of transformers {transformers.__version__} and not in the local "
        f"cache; nothing is downloaded by itself. Fetch it: hf download {place}",
    )


def _read_config(transformers: ModuleType, place: str, folder: Path | None) -> Any:
    try:
        if folder is None:
            return transformers.AutoConfig.for_model(place)
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError("E120", f"hf:{place}: transformers cannot use its config.json: {reason}") from error


def _config_key(config: Any, name: str) -> str | None:
    """Their name of our size; the configuration's own one where it has an alias."""
    known = {*config.to_dict(), "num_labels"}
    aliases = getattr(config, "attribute_map", {})
    for key in _SIZES[name]:
        key = aliases.get(key, key)
        if key in known:
            return key
    return None


def _with_sizes(config: Any, sizes: Mapping[str, int], place: str) -> Any:
    """The configuration made anew with other sizes, so that what it derives from them follows."""
    raw = config.to_dict()
    for name in _DERIVED & raw.keys():
        if raw[name] == _derived(config, name):
            del raw[name]
    for name, value in sizes.items():
        key = _config_key(config, name)
        if key is None:
            has = ", ".join(f"model.{other}" for other in _SIZES if _config_key(config, other))
            raise ConfigError(
                "E106",
                f"model.{name} = {value}: hf:{place} ({config.model_type}) has no such size; it has {has}",
            )
        raw[key] = value
    if "num_labels" in sizes:  # is the length of their names, which are those of other classes
        for names in ("id2label", "label2id"):
            raw.pop(names, None)
    layers = sizes.get("num_layers")
    kinds = raw.get("layer_types")
    if layers is not None and kinds and len(kinds) != layers:
        raw["layer_types"] = kinds[:layers] if layers < len(kinds) else None
    try:
        return type(config)(**raw)
    except Exception as error:  # transformers has types of its own for sizes that do not fit
        raise ConfigError("E106", f"model hf:{place}: {' '.join(str(error).split())}") from error


def _derived(config: Any, name: str) -> int:
    heads = int(config.num_attention_heads)
    return heads if name == "num_key_value_heads" else int(config.hidden_size) // heads


def _choose_class(
    transformers: ModuleType, place: str, config: Any, task: str | None
) -> tuple[str, type[nn.Module]]:
    tables = {name: getattr(transformers, mapping) for name, mapping in _MAPPINGS.items()}
    classes = {name: table[type(config)] for name, table in tables.items() if type(config) in table}
    classes = {name: found[0] if isinstance(found, tuple) else found for name, found in classes.items()}
    if not classes:
        raise ConfigError(
            "E120",
            f"hf:{place}: transformers has no class of {config.model_type!r} for {', '.join(_MAPPINGS)}",
        )
    if task is not None:
        if task not in classes:
            raise ConfigError(
                "E120",
                f'model.task = "{task}": hf:{place} ({config.model_type}) can be {", ".join(sorted(classes))}',
            )
        return task, classes[task]
    named = config.architectures or []
    if not named:
        return next(iter(classes.items()))
    for name, found in classes.items():
        if found.__name__ in named:
            return name, found
    raise ConfigError(
        "E120",
        f"hf:{place} names architectures = {named} in config.json, which are trained for no task here. Set "
        f"model.task to one of {', '.join(sorted(classes))}.",
    )
