"""Models as numbers: the shape of each preset, and rules a shape must keep.

Owns the preset table. Knows no torch and builds no module; counting is in `counts.py`.
Simplifications: a preset describes one stack of equal layers; rotary frequency scaling of the Llama 3.1
and 3.2 checkpoints is not described, because it changes no size and no speed.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from typing import Literal

from meshwright.errors import ConfigError
from meshwright.presets.nearest import find_entry

Family = Literal["gpt", "llama", "mixtral", "bert", "mlp"]
FAMILIES: tuple[Family, ...] = ("gpt", "llama", "mixtral", "bert", "mlp")
# The sizes each family needs; every other size of that family must stay 0.
_ATTENTION_SIZES = (
    "num_layers",
    "dim",
    "num_heads",
    "num_kv_heads",
    "ffn_dim",
    "vocab_size",
    "max_seq_len",
)
_SIZES: dict[Family, tuple[str, ...]] = {
    "gpt": _ATTENTION_SIZES,
    "llama": _ATTENTION_SIZES,
    "mixtral": (*_ATTENTION_SIZES, "num_experts", "experts_per_token"),
    "bert": _ATTENTION_SIZES,
    "mlp": ("num_layers", "dim", "input_dim", "num_classes"),
}
_ALL_SIZES = (*_SIZES["mixtral"], "input_dim", "num_classes")
_ROTARY: tuple[Family, ...] = ("llama", "mixtral")


@dataclass(frozen=True)
class ModelPreset:
    """The shape of one model. A size that the family does not have is 0.

    Attributes:
        name: the name that is printed.
        family: gpt (learned positions, LayerNorm, GELU, biases), llama (RMSNorm, rotary, SwiGLU, no biases),
            mixtral (llama whose feed-forward is chosen among experts by a router), bert (post-norm encoder
            with a masked-token head, not causal), mlp (hidden layers with ReLU).
        num_layers: transformer blocks, or hidden layers of an mlp.
        dim: width of the residual stream, or of a hidden layer.
        num_heads: query heads; `dim / num_heads` is the width of a head.
        num_kv_heads: key and value heads; each serves `num_heads / num_kv_heads` query heads.
        ffn_dim: inner width of the feed-forward part (of one expert).
        vocab_size: token ids, unpadded.
        max_seq_len: longest sequence in tokens.
        tied_embedding: the output projection is the token embedding itself.
        num_experts: experts of each layer.
        experts_per_token: experts that each token visits.
        input_dim: features of a sample.
        num_classes: classes to tell apart.
        rope_theta: base of the rotary frequencies.
        norm_epsilon: added to the variance in each normalisation.
        aliases: other names that `find_model` understands.
        source: where the numbers come from.
    """

    name: str
    family: Family
    num_layers: int
    dim: int
    num_heads: int = 0
    num_kv_heads: int = 0
    ffn_dim: int = 0
    vocab_size: int = 0
    max_seq_len: int = 0
    tied_embedding: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    input_dim: int = 0
    num_classes: int = 0
    rope_theta: float = 0.0
    norm_epsilon: float = 1e-5
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(
                "E106", f"{self.name}: unknown family {self.family!r}; legal: {', '.join(FAMILIES)}"
            )
        _check_sizes(self)
        if self.num_heads:
            _check_heads(self)
        if self.family == "mixtral" and self.experts_per_token > self.num_experts:
            raise ConfigError(
                "E106",
                f"{self.name}: experts_per_token={self.experts_per_token} exceeds "
                f"num_experts={self.num_experts}; use 1..{self.num_experts}",
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head; 0 for a family without attention."""
        return self.dim // self.num_heads if self.num_heads else 0

    @property
    def causal(self) -> bool:
        """Whether a token sees only earlier tokens."""
        return self.family in ("gpt", "llama", "mixtral")

    def with_changes(self, **numbers: int | float | bool) -> ModelPreset:
        """A copy with some numbers changed, checked by the same rules.

        Only what is named changes, with one exception: where every query head has its own key head,
        `num_heads` alone changes both. In particular `ffn_dim` does not follow `dim`.

        Raises:
            ConfigError: E106 for an unknown number, or a shape that cannot be built.
        """
        legal = [field.name for field in fields(self) if field.name not in _NOT_NUMBERS]
        for key in numbers:
            if key not in legal:
                near = difflib.get_close_matches(key, legal, n=1, cutoff=0.4)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError("E106", f"a model has no number {key!r}.{hint} Legal: {', '.join(legal)}")
        if "num_heads" in numbers and self.num_heads == self.num_kv_heads:
            numbers.setdefault("num_kv_heads", numbers["num_heads"])
        return replace(self, **numbers)  # type: ignore[arg-type]


_NOT_NUMBERS = ("name", "family", "aliases", "source")


def _divisors(number: int) -> str:
    return " ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _check_sizes(preset: ModelPreset) -> None:
    needed = _SIZES[preset.family]
    for key in _ALL_SIZES:
        value = getattr(preset, key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError("E106", f"{preset.name}: {key}={value!r} is not a whole number")
        if key in needed and value < 1:
            raise ConfigError("E106", f"{preset.name}: {key}={value}; a {preset.family} needs {key} >= 1")
        if key not in needed and value != 0:
            raise ConfigError(
                "E106",
                f"{preset.name}: {key}={value}, but a {preset.family} has no {key}; "
                f"its sizes are {', '.join(needed)}",
            )


def _check_heads(preset: ModelPreset) -> None:
    heads, kv_heads, dim = preset.num_heads, preset.num_kv_heads, preset.dim
    if dim % heads:
        raise ConfigError(
            "E106", f"{preset.name}: num_heads={heads} does not divide dim={dim}; use one of {_divisors(dim)}"
        )
    if preset.family in ("gpt", "bert") and kv_heads != heads:
        raise ConfigError(
            "E106",
            f"{preset.name}: num_kv_heads={kv_heads} with num_heads={heads}: a {preset.family} has one key "
            f"head per query head; use num_kv_heads={heads}, or a llama for grouped queries",
        )
    if heads % kv_heads:
        raise ConfigError(
            "E106",
            f"{preset.name}: num_kv_heads={kv_heads} does not divide num_heads={heads}; "
            f"use one of {_divisors(heads)}",
        )
    if preset.family in _ROTARY and preset.head_dim % 2:
        legal = " ".join(str(n) for n in range(1, dim + 1) if dim % n == 0 and (dim // n) % 2 == 0)
        raise ConfigError(
            "E106",
            f"{preset.name}: dim={dim} / num_heads={heads} = {preset.head_dim} is odd, but rotary positions "
            f"turn pairs; " + (f"use num_heads of {legal}" if legal else "use an even dim"),
        )


def find_model(name: str) -> ModelPreset:
    """The preset called `name`, e.g. `llama-3.1-8b` or its alias `llama-3-8b`; case does not matter.

    Raises:
        ConfigError: E104, naming the nearest preset and listing all.
    """
    return find_entry(name, MODELS, kind="model preset")


def _gpt(name: str, layers: int, dim: int, heads: int, **rest: object) -> ModelPreset:
    sizes = {
        "num_kv_heads": heads,
        "ffn_dim": 4 * dim,
        "vocab_size": 50257,
        "max_seq_len": 1024,
        "tied_embedding": True,
    }
    return ModelPreset(name, "gpt", layers, dim, num_heads=heads, **{**sizes, **rest})  # type: ignore[arg-type]


def _llama3(name: str, layers: int, dim: int, heads: int, **rest: object) -> ModelPreset:
    sizes = {
        "num_kv_heads": 8,
        "vocab_size": 128256,
        "max_seq_len": 131072,
        "rope_theta": 500000.0,
    }
    return ModelPreset(name, "llama", layers, dim, num_heads=heads, **{**sizes, **rest})  # type: ignore[arg-type]


_GPT2 = "Radford et al. 2019, table 2, and the released checkpoints"
_LLAMA3 = "Grattafiori et al. 2024 (arXiv 2407.21783), table 3, and the released config.json"

MODELS: tuple[ModelPreset, ...] = (
    _gpt(
        "gpt-nano",
        4,
        128,
        4,
        vocab_size=256,
        max_seq_len=128,
        source="ours: a byte-level GPT that learns in a minute on a CPU",
    ),
    ModelPreset(
        "llama-nano",
        "llama",
        4,
        128,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=352,
        vocab_size=256,
        max_seq_len=128,
        rope_theta=10000.0,
        source="ours: a byte-level Llama with grouped queries for a CPU",
    ),
    ModelPreset(
        "mlp-digits",
        "mlp",
        2,
        128,
        input_dim=64,
        num_classes=10,
        source="ours: 8 x 8 pictures of the ten digits",
    ),
    _gpt("gpt2-124m", 12, 768, 12, aliases=("gpt2", "gpt2-small", "gpt-2"), source=_GPT2),
    _gpt("gpt2-medium", 24, 1024, 16, aliases=("gpt2-355m",), source=_GPT2),
    _gpt("gpt2-large", 36, 1280, 20, aliases=("gpt2-774m",), source=_GPT2),
    _gpt("gpt2-xl", 48, 1600, 25, aliases=("gpt2-1.5b", "gpt2-1558m"), source=_GPT2),
    _gpt(
        "gpt3-175b",
        96,
        12288,
        96,
        max_seq_len=2048,
        aliases=("gpt3", "gpt-3", "gpt-3-175b", "gpt-175b"),
        source="Brown et al. 2020 (arXiv 2005.14165), table 2.1; every layer dense",
    ),
    _gpt(
        "gpt-1t",
        128,
        25600,
        160,
        vocab_size=51200,
        max_seq_len=2048,
        aliases=("gpt3-1t", "gpt-1008b"),
        source="Narayanan et al. 2021 (arXiv 2104.04473), table 1",
    ),
    _llama3(
        "llama-1b",
        16,
        2048,
        32,
        ffn_dim=8192,
        tied_embedding=True,
        aliases=("llama-3.2-1b", "meta-llama/llama-3.2-1b"),
        source="the released Llama-3.2-1B config.json",
    ),
    _llama3(
        "llama-3.1-8b",
        32,
        4096,
        32,
        ffn_dim=14336,
        aliases=("llama-8b", "llama-3-8b", "llama3-8b", "llama3.1-8b", "meta-llama/llama-3.1-8b"),
        source=_LLAMA3,
    ),
    _llama3(
        "llama-3.1-70b",
        80,
        8192,
        64,
        ffn_dim=28672,
        aliases=("llama-70b", "llama-3-70b", "llama3-70b", "llama3.1-70b", "meta-llama/llama-3.1-70b"),
        source=_LLAMA3,
    ),
    _llama3(
        "llama-3.1-405b",
        126,
        16384,
        128,
        ffn_dim=53248,
        aliases=("llama-405b", "llama-3-405b", "llama3-405b", "llama3.1-405b", "meta-llama/llama-3.1-405b"),
        source=_LLAMA3,
    ),
    ModelPreset(
        "mixtral-8x7b",
        "mixtral",
        32,
        4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_dim=14336,
        vocab_size=32000,
        max_seq_len=32768,
        num_experts=8,
        experts_per_token=2,
        rope_theta=1e6,
        aliases=("mixtral", "mistralai/mixtral-8x7b-v0.1"),
        source="Jiang et al. 2024 (arXiv 2401.04088), table 1",
    ),
    ModelPreset(
        "bert-large",
        "bert",
        24,
        1024,
        num_heads=16,
        num_kv_heads=16,
        ffn_dim=4096,
        vocab_size=30522,
        max_seq_len=512,
        tied_embedding=True,
        norm_epsilon=1e-12,
        aliases=("bert-large-uncased", "bert-336m"),
        source="Devlin et al. 2019 (arXiv 1810.04805), section 3, and the released config",
    ),
)
