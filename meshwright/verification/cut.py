"""A run file's model and batch, cut to what compares in seconds: the same code path, fewer and smaller layers.

Owns which sizes are cut and how far. Kept are the family, tying, the ratio of query to key/value heads, the ratio of
feed-forward to width, and the number of micro-steps up to three.
"""

from __future__ import annotations

from meshwright.presets import find_model
from meshwright.training.config import RunConfig

_NUM_LAYERS = 2
_MAX_HEADS = 8
_HEAD_DIM = 8
_WIDTH = 32  # of families without heads
_VOCAB_SIZE = 512
_SEQ_LEN = 32
_MICRO_BATCH = 2
_NUM_MICROBATCHES = 3
# Adam divides by the root of the second moment: a gradient that is mathematically zero would become noise of the size
# of the learning rate with the usual 1e-8.
_MIN_EPS = 1e-6


def eps_override(config: RunConfig) -> list[str]:
    """The override that keeps an adaptive optimizer from magnifying rounding; empty where there is none."""
    chosen = config.train.optimizer
    if chosen.name == "sgd" or chosen.eps >= _MIN_EPS:
        return []
    return [f"train.optimizer.eps={_MIN_EPS}"]


def cut_overrides(config: RunConfig, *, processes: int) -> list[str]:
    """Texts `a.b=c` that cut the model, the sequence and the batch of `config` for `processes` ranks.

    A user's module (`py:`) stays as its function builds it, a model of Hugging Face (`hf:`) as it is configured; their
    batch is cut alike.
    """
    known = config.model.source.startswith("preset:")
    return [*(_model_sizes(config) if known else []), *_batch_sizes(config, processes)]


def _model_sizes(config: RunConfig) -> list[str]:
    preset = find_model(config.model.source.partition(":")[2])

    def size(name: str) -> int:
        chosen = getattr(config.model, name, None)
        return int(chosen if chosen is not None else getattr(preset, name))

    layers = min(size("num_layers"), _NUM_LAYERS)
    if preset.family == "mlp":
        return [f"model.num_layers={layers}", f"model.dim={min(size('dim'), _WIDTH)}"]
    heads, kv_heads = size("num_heads"), size("num_kv_heads")
    group = heads // kv_heads
    kept_kv = 2 if kv_heads >= 2 and 2 * group <= _MAX_HEADS else 1
    head_dim = min(size("dim") // heads, _HEAD_DIM)
    dim = kept_kv * group * head_dim
    ffn = max(1, round(dim * size("ffn_dim") / size("dim")))
    seq_len = min(config.data.seq_len, _SEQ_LEN)
    # Files of ids may hold every id of the vocabulary; text readers give bytes.
    keeps_ids = config.data.train.startswith("nanogpt:")
    vocab = size("vocab_size") if keeps_ids else min(size("vocab_size"), _VOCAB_SIZE)
    sizes = {
        "num_layers": layers,
        "dim": dim,
        "num_heads": kept_kv * group,
        "num_kv_heads": kept_kv,
        "ffn_dim": ffn,
        "vocab_size": vocab,
        "max_seq_len": seq_len,
    }
    overrides = [f"model.{name}={value}" for name, value in sizes.items()]
    overrides.append(f"data.seq_len={seq_len}")
    return overrides if config.data.packing else [*overrides, 'data.overlong="truncate"']


def _batch_sizes(config: RunConfig, processes: int) -> list[str]:
    whole = config.plan.micro_batch or max(1, config.train.global_batch // processes)
    micro = min(whole, _MICRO_BATCH)
    num_microbatches = min(max(1, config.train.global_batch // (whole * processes)), _NUM_MICROBATCHES)
    return [
        f"plan.micro_batch={micro}",
        f"train.global_batch={processes * micro * num_microbatches}",
    ]
