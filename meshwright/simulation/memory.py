"""Memory of a GPT by formulas: what a layer keeps for backward in 16 bits, and what a pipeline stage then holds.

For plans that are too large to be run or traced. A layer is the paper's: attention written out, LayerNorm, GELU,
biases, dropout behind attention's weights and both sublayers with masks of a byte an element; every tensor that
backward reads is counted once, in 2 bytes. A run is predicted from its own operations instead
(`training/activations.py`).

With s tokens, b sequences, width h, ffn width f, a heads, t ranks of tensor parallelism:

| part of a layer | bytes | with sequence parallelism |
|---|---|---|
| inputs of two norms, of attention and of the feed-forward part, two masks | 10·s·b·h | /t |
| queries, keys, values, the mixed values | 8·s·b·h/t | |
| inputs of GELU and of the second matrix | 4·s·b·f/t | |
| softmax, its mask, its dropped result (selective: none) | 5·a·s²·b/t | |

Source: Korthikanti et al., Reducing activation recomputation in large transformer models, 2022 (arXiv 2205.05198),
sections 4 and 5.

Simplifications: embeddings, head and statistics of norms are left out, and so is the one layer that is being computed
again in backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.presets.models import ModelPreset

Kept = Literal["none", "selective", "full"]
# 2 of weights and 4 of gradients, 12 of masters and Adam's moments in float32.
STATE_BYTES_A_PARAMETER = 18


@dataclass(frozen=True)
class Split:
    """How a model is cut.

    Attributes:
        tensor: ranks of tensor parallelism.
        stages: ranks of the pipeline.
        chunks: parts of the model on each of them, interleaved where more than 1.
        sequence_parallel: what tensor parallelism does not split is split along the sequence.
    """

    tensor: int = 1
    stages: int = 1
    chunks: int = 1
    sequence_parallel: bool = False


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a rank of one pipeline stage.

    Attributes:
        states: weights, gradients, masters and moments of its layers' matrices.
        activations: of all micro-batches that wait for their backward when most do.
    """

    states: float
    activations: float


def layer_activation_bytes(
    preset: ModelPreset, *, seq_len: int, micro_batch: int, split: Split = Split(), kept: Kept = "none"
) -> float:
    """What one layer keeps between forward and backward of one micro-batch, on one rank.

    Args:
        preset: a gpt.
        seq_len: tokens of a sequence.
        micro_batch: sequences of a rank.
        split: its tensor and sequence parallelism.
        kept: `plan.recompute`'s word.
    """
    assert preset.family == "gpt", f"{preset.name} is a {preset.family}: the formulas are of a gpt"
    tokens = seq_len * micro_batch
    stream = tokens * preset.dim
    whole = split.tensor if split.sequence_parallel else 1
    if kept == "full":
        return 2 * stream / whole
    inside = (8 * stream + 4 * tokens * preset.ffn_dim) / split.tensor
    scores = 5 * preset.num_heads * seq_len * tokens / split.tensor if kept == "none" else 0.0
    return 10 * stream / whole + inside + scores


def micro_batches_in_flight(split: Split, *, stage: int = 0) -> float:
    """How often a stage's whole layers are held at once, with as many micro-batches as that takes.

    Of 1F1B, interleaved where a rank has several chunks; a chunk of one micro-batch is 1/chunks.

    Args:
        split: its stages and chunks.
        stage: which rank of the pipeline, from 0.
    """
    p, v = split.stages, split.chunks
    if v == 1:
        return float(p - stage)
    return p * (1 + (p - 1) / (p * v)) - 2 * stage / v


def stage_memory(
    preset: ModelPreset,
    split: Split,
    *,
    seq_len: int,
    micro_batch: int,
    kept: Kept = "none",
    stage: int = 0,
) -> StageMemory:
    """What a rank of pipeline stage `stage` holds; see `layer_activation_bytes` and `micro_batches_in_flight`."""
    layers = preset.num_layers / split.stages
    matrices = 4 * preset.dim * preset.dim + 2 * preset.dim * preset.ffn_dim
    a_layer = layer_activation_bytes(preset, seq_len=seq_len, micro_batch=micro_batch, split=split, kept=kept)
    return StageMemory(
        STATE_BYTES_A_PARAMETER * matrices * layers / split.tensor,
        a_layer * layers * micro_batches_in_flight(split, stage=stage),
    )
