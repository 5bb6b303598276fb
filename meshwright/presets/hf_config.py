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
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "dim": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head"),
    "vocab_size": ("vocab_size",),
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
    family = _FAMILIES[kind]
    inner = values.get("intermediate_size") or values.get("n_inner") or values.get("ffn_dim") or 4 * dim
    kv_heads = values.get("num_key_value_heads") or heads
    return ModelPreset(
        name=_name(values, file),
        family=family,
        num_layers=sizes["num_layers"],
        dim=dim,
        num_heads=heads,
        vocab_size=sizes["vocab_size"],
        num_kv_heads=int(kv_heads) if family == "llama" else heads,
        ffn_dim=int(inner),
        max_seq_len=int(values.get("max_position_embeddings") or values.get("n_positions") or 2048),
        tied_embedding=bool(values.get("tie_word_embeddings", family != "llama")),
        source=str(file),
    )


def _name(values: Mapping[str, object], file: Path) -> str:
    named = values.get("_name_or_path")
    return str(named) if named else file.absolute().parent.name or str(values["model_type"])


def _size(values: Mapping[str, object], names: tuple[str, ...], file: Path) -> int:
    for name in names:
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    raise ConfigError(
        "E287", f"{file}: none of {', '.join(names)} is a whole number; give a model's config.json"
    )
