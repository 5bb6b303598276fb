"""Parameters and FLOPs of a preset, by formulas that tests hold against real modules.

Owns the arithmetic; knows no torch. Simplifications: only matrix products and attention count as FLOPs
(norms, softmax and activations are bandwidth, not arithmetic), and a multiply-add is two.
"""

from __future__ import annotations

import math

from meshwright.presets.models import ModelPreset

# Segment embeddings of a BERT: first and second sentence.
_BERT_NUM_SEGMENTS = 2
# Forward 2 FLOPs per parameter and token, backward twice that (input and weight gradient).
_FLOPS_PER_PARAMETER = 6


def _attention_matrices(preset: ModelPreset) -> int:
    """Numel of the query, key, value and output projections of one layer, without biases."""
    kv_dim = preset.num_kv_heads * preset.head_dim
    return 2 * preset.dim * preset.dim + 2 * preset.dim * kv_dim


def _feed_forward_matrices(preset: ModelPreset, num_experts: int) -> int:
    """Numel of one layer's feed-forward matrices with `num_experts` experts, and of the router, if any."""
    num_matrices = 2 if preset.family in ("gpt", "bert") else 3
    expert = num_matrices * preset.dim * preset.ffn_dim
    if preset.family == "mixtral":
        return num_experts * expert + preset.dim * preset.num_experts
    return expert


def _layer_vectors(preset: ModelPreset) -> int:
    """Numel of one layer's biases and normalisation weights."""
    if preset.family in ("gpt", "bert"):
        biases = 4 * preset.dim + preset.ffn_dim + preset.dim
        norms = 2 * 2 * preset.dim
        return biases + norms
    return 2 * preset.dim


def _outside_layers(preset: ModelPreset) -> int:
    """Numel of embeddings, the last norm and the output head."""
    dim, vocab = preset.dim, preset.vocab_size
    head = 0 if preset.tied_embedding else dim * vocab
    if preset.family == "gpt":
        return vocab * dim + preset.max_seq_len * dim + 2 * dim + head
    if preset.family == "bert":
        embeddings = (vocab + preset.max_seq_len + _BERT_NUM_SEGMENTS) * dim + 2 * dim
        transform = dim * dim + dim + 2 * dim
        return embeddings + transform + vocab + head
    return vocab * dim + dim + head


def _mlp_matrices(preset: ModelPreset) -> int:
    inner = (preset.num_layers - 1) * preset.dim * preset.dim
    return preset.input_dim * preset.dim + inner + preset.dim * preset.num_classes


def num_parameters(preset: ModelPreset) -> int:
    """Exact number of trainable parameters; a tied matrix counts once, all experts count."""
    if preset.family == "mlp":
        return _mlp_matrices(preset) + preset.num_layers * preset.dim + preset.num_classes
    layer = (
        _attention_matrices(preset)
        + _feed_forward_matrices(preset, preset.num_experts)
        + _layer_vectors(preset)
    )
    return preset.num_layers * layer + _outside_layers(preset)


def matmul_parameters(preset: ModelPreset) -> int:
    """Parameters a token is multiplied with: the output head yes, embedding tables and idle experts no."""
    if preset.family == "mlp":
        return _mlp_matrices(preset)
    layer = _attention_matrices(preset) + _feed_forward_matrices(preset, preset.experts_per_token)
    head = preset.dim * preset.vocab_size
    transform = preset.dim * preset.dim if preset.family == "bert" else 0
    return preset.num_layers * layer + transform + head


def matmul_flops_per_token(preset: ModelPreset, seq_len: int, *, causal: bool) -> float:
    """FLOPs of forward and backward per token, without recomputation (the numerator of MFU).

    6 per matmul parameter, plus attention: 12 * layers * heads * head width * seq_len for the full square of
    scores, half of it where only the lower triangle is counted (Chowdhery et al. 2022, appendix B, counts the
    square). For an mlp a token is a sample, and `seq_len` and `causal` have no part in it.

    Args:
        preset: the model.
        seq_len: tokens of a sequence.
        causal: count half of the square, as a causal kernel computes; only for a causal model.
    """
    assert preset.causal or not causal, f"{preset.name} attends in both directions: causal=False"
    square = 12 * preset.num_layers * preset.num_heads * preset.head_dim * seq_len
    return float(_FLOPS_PER_PARAMETER * matmul_parameters(preset) + (square / 2 if causal else square))


def short_count(number: float) -> str:
    """Three digits for people: 842 K, 8.03 B, 1.01 T; below a thousand the number itself."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            # Rounding to three digits must not print 1e+03.
            digits = max(0, 2 - int(math.log10(number / size)))
            return f"{number / size:.{digits}f} {letter}"
    return f"{number:g}"
