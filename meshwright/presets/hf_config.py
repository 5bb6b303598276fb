"""A Hugging Face config.json as a preset: the shape of the model, read without transformers and without torch.

Knows the names that config.json files use for sizes. Simplifications: architectures that differ from their relative
here in vectors only (norms of queries and keys, biases) count as it; experts and heads of another width are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.presets.models import Family, ModelPreset

# model_type of config.json, and the family whose shape it has.
_FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("gpt2", "opt", "gpt_neox", "gpt_bigcode", "bloom"), "gpt"),
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo", "olmo2", "smollm3", "granite"), "llama"
    ),
    **dict.fromkeys(("bert", "roberta"), "bert"),
}
_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "dim": ("hidden_size", "n_embd", "dim", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocab_size": ("vocab_size",),
}
_OTHERS = {
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "ffn_dim": ("intermediate_size", "n_inner", "ffn_dim"),
    "max_seq_len": ("max_position_embeddings", "n_positions", "max_seq_len", "block_size"),
}


def read_hf_config(path: Path) -> ModelPreset:
    """The preset that a config.json describes.

    Args:
        path: the file, or the folder that holds it.

    Raises:
        ConfigError: E287 where it cannot be read, or describes no model that can be priced; E106 for sizes that do not
            belong together.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("E287", f"{file} cannot be read: {error}; give a model's config.json") from error
    if not isinstance(values, dict):
        raise ConfigError("E287", f"{file} holds no table of sizes; give a model's config.json")
    kind = str(values.get("model_type", ""))
    if kind not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ConfigError("E287", f"{file}: model_type={kind!r} has no shape here; known: {known}")
    sizes = {key: _size(values, names, file) for key, names in _NAMES.items()}
    heads, dim = sizes["num_heads"], sizes["dim"]
    width = values.get("head_dim") or (dim // heads)
    if width * heads != dim:
        raise ConfigError(
            "E287",
            f"{file}: {heads} heads of width {width} are not hidden_size={dim}; such models cannot be priced, "
            f"take the nearest with head_dim={dim // heads}",
        )
    for named in (name for names in _OTHERS.values() for name in names):
        value = values.get(named)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ConfigError(
                "E287", f"{file}: {named}={value!r} is no whole number; give a model's config.json"
            )
    family = _FAMILIES[kind]
    tied = bool(values.get("tie_word_embeddings", family != "llama"))
    return _preset(values, sizes, family, tied=tied, name=_name(values, file), source=str(file))


def shapes_of_config(values: Mapping[str, object], name: str) -> list[ModelPreset]:
    """The shapes that a Python object's sizes may mean; none where one of the sizes is missing.

    Args:
        values: as a config.json, or as people name sizes: n_layer or num_layers, n_embd or dim, n_head or num_heads.
        name: of the model.

    Raises:
        ConfigError: E106 for sizes that do not belong together.
    """
    sizes = {key: _number(values, names) for key, names in _NAMES.items()}
    if not all(sizes.values()) or values.get("num_experts") or values.get("num_local_experts"):
        return []
    known = _FAMILIES.get(str(values.get("model_type", "")))
    families: tuple[Family, ...] = ("gpt", "llama") if known is None else (known,)
    return [
        _preset(values, sizes, family, tied=tied, name=name, source=name)
        for family in families
        for tied in (True, False)
    ]


def _preset(
    values: Mapping[str, object],
    sizes: Mapping[str, int],
    family: Family,
    *,
    tied: bool,
    name: str,
    source: str,
) -> ModelPreset:
    others = {key: _number(values, names) for key, names in _OTHERS.items()}
    return ModelPreset(
        name=name,
        family=family,
        num_layers=sizes["num_layers"],
        dim=sizes["dim"],
        num_heads=sizes["num_heads"],
        vocab_size=sizes["vocab_size"],
        num_kv_heads=others["num_kv_heads"] or sizes["num_heads"]
        if family == "llama"
        else sizes["num_heads"],
        ffn_dim=others["ffn_dim"] or 4 * sizes["dim"],
        max_seq_len=others["max_seq_len"] or 2048,
        tied_embedding=tied,
        source=source,
    )


def _number(values: Mapping[str, object], names: tuple[str, ...]) -> int:
    """The first of these names that is a whole number; 0 where none is."""
    found = (values.get(name) for name in names)
    return next(
        (value for value in found if isinstance(value, int) and not isinstance(value, bool) and value), 0
    )


def _name(values: Mapping[str, object], file: Path) -> str:
    named = values.get("_name_or_path")
    return str(named) if named else file.absolute().parent.name or str(values["model_type"])


def _size(values: Mapping[str, object], names: tuple[str, ...], file: Path) -> int:
    value = _number(values, names)
    if not value:
        raise ConfigError(
            "E287", f"{file}: none of {', '.join(names)} is a whole number; give a model's config.json"
        )
    return value
