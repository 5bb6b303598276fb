"""Memory of the fullest rank under any layout, by formulas, with its parts.

States: weights in 16 bits, gradients in 2 or 4 bytes, masters and two moments in float32, each cut by what `zero`
shares. Activations: of attention written out, the paper's layer (`meshwright/simulation/memory.py`, with dropout);
of fused attention, every tensor that backward reads, once, in 16 bits: inputs and results of two norms, queries, keys,
values and the mixed values, and what the feed-forward part keeps.

Source: ZeRO (arXiv 1910.02054), section 3; Korthikanti et al. 2022 (arXiv 2205.05198), sections 4 and 5.
Simplifications: the allocator wastes nothing; the first stage is the fullest unless the last one's logits are more.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.simulation.job import Cluster, Layout, Workload, num_microbatches
from meshwright.simulation.layers import layer_numel
from meshwright.simulation.memory import Split, layer_activation_bytes, micro_batches_in_flight
from meshwright.simulation.step import stage_layers, stage_numel

_GIB = 2**30
# A device's context with loaded kernels, which a framework does not count: 1,573 MiB on an A100 (BigScience), 0.5 to
# 1.8 GiB elsewhere (ml-engineering).
_CONTEXT_BYTES = 1573 * 2**20
# Of the groups of one axis.
_BUFFERS_BYTES = 0.5 * _GIB


@dataclass(frozen=True)
class PeakBytes:
    """Bytes of the fullest rank; `peak` is their sum.

    Attributes:
        weights, gradients, optimizer: states that stay.
        gathered: weights that zero3 holds for a while, two layers.
        activations: kept for backward, and of the layer that runs again.
        logits: of one micro-batch, where they are made.
        communication: buffers of collectives.
        reserve: the device's context.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    logits: float
    communication: float
    reserve: float

    @property
    def peak(self) -> float:
        """Bytes at the peak."""
        states = self.weights + self.gradients + self.optimizer + self.gathered
        return states + self.activations + self.logits + self.communication + self.reserve


def state_bytes(
    numel: float, *, zero: int, shards: int, weight: float = 2, gradient: float = 4, optimizer: float = 12
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer of `numel` parameters of a rank.

    Args:
        numel: parameters before sharing.
        zero: 0 nothing is shared, 1 the optimizer, 2 and gradients, 3 and weights.
        shards: ranks that share.
        weight, gradient, optimizer: bytes of a parameter.
    """
    cut = [shards if zero >= stage else 1 for stage in (3, 2, 1)]
    return numel * weight / cut[0], numel * gradient / cut[1], numel * optimizer / cut[2]


@dataclass(frozen=True)
class States:
    """Attributes: bytes of weights, gradients, optimizer, which stay, and of weights that zero3 gathers for a while."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float


@dataclass(frozen=True)
class HeldPieces:
    """What many layouts have in common.

    Attributes:
        states: differ with degrees, zero and shard.
        kept, whole: `kept_layer_bytes` and `whole_layer_bytes`; differ with tp, cp, micro-batch, recomputation and
            sequence parallelism.
    """

    states: States
    kept: float
    whole: float


def states_of(work: Workload, layout: Layout) -> States:
    """States of the fullest rank."""
    numel, shards = stage_numel(work, layout), layout.num_shards
    gradient = layout.gradient_bytes + layout.accumulator_bytes
    parts = state_bytes(
        numel, zero=layout.zero, shards=shards, gradient=gradient, optimizer=layout.optimizer_bytes
    )
    is_gathered = layout.zero == 3 and shards > 1
    return States(*parts, 2 * 2.0 * layer_numel(work) / layout.tp if is_gathered else 0.0)


def peak_bytes(
    work: Workload, layout: Layout, cluster: Cluster | None = None, *, pieces: HeldPieces | None = None
) -> PeakBytes:
    """Predict the peak of the fullest rank.

    Args:
        work: the model and its batch.
        layout: how it is carried out.
        cluster: not needed but for devices that are not GPUs.
        pieces: what is known of it already.
    """
    pieces = pieces or HeldPieces(
        states_of(work, layout), kept_layer_bytes(work, layout), whole_layer_bytes(work, layout)
    )
    first, last = _activations(work, layout, pieces)
    tokens = layout.micro_batch * work.seq_len / layout.cp
    logits = layout.logit_bytes * tokens * work.model.vocab_size / layout.tp
    if layout.pp > 1 and first >= last + logits:
        activations, logits = first, 0.0
    else:
        activations = last
    on_cpu = cluster is not None and cluster.machine.name == "cpu"
    num_axes = (layout.dp > 1) + (layout.tp > 1) + (layout.pp > 1) + (layout.cp > 1)
    return PeakBytes(
        pieces.states.weights,
        pieces.states.gradients,
        pieces.states.optimizer,
        pieces.states.gathered,
        activations,
        logits,
        0.0 if on_cpu else _BUFFERS_BYTES * num_axes + layout.bucket_bytes,
        0.0 if on_cpu else _CONTEXT_BYTES,
    )


def _activations(work: Workload, layout: Layout, pieces: HeldPieces) -> tuple[float, float]:
    """What first and last stage keep, the repeated layer included."""
    full, last = stage_layers(work.model.num_layers, layout.pp, halves=layout.half_layers)
    again = pieces.whole if layout.recompute in ("full", "half") else 0.0
    m = num_microbatches(work, layout)
    held = pieces.kept * full
    if layout.keeps_outputs and layout.pp > 1:
        held += 2.0 * layout.micro_batch * work.seq_len * work.model.dim / layout.cp
    at_first = held * min(in_flight(layout, 0, m), m) + again
    return at_first, pieces.kept * last * min(in_flight(layout, layout.pp - 1, m), m) + again


def in_flight(layout: Layout, stage: int, m: int) -> float:
    """Micro-batches whose activations a stage of the pipeline holds at most."""
    p = layout.pp
    if p == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return float(m)
    if layout.schedule == "zb-h2":
        return float(2 * (p - stage) - 1)
    if layout.schedule in ("zb-v", "dualpipe"):
        return float(p + (layout.schedule == "dualpipe"))
    chunks = layout.chunks if layout.schedule == "interleaved" else 1
    return max(1.0, micro_batches_in_flight(Split(1, p, chunks), stage=stage))


def whole_layer_bytes(work: Workload, layout: Layout) -> float:
    """What one layer keeps where nothing runs again."""
    model, t = work.model, layout.tp
    if layout.attention == "unfused" and model.family == "gpt":
        split = Split(tensor=t, sequence_parallel=layout.sequence_parallel)
        whole = layer_activation_bytes(
            model, seq_len=work.seq_len, micro_batch=layout.micro_batch, split=split, kept="none"
        )
        return whole / layout.cp
    tokens = layout.micro_batch * work.seq_len / layout.cp
    stream = 8 * model.dim / (t if layout.sequence_parallel else 1)
    kv = model.num_kv_heads * model.head_dim
    inside = (4 * model.dim + 4 * kv) / t
    gated = model.family not in ("gpt", "bert")
    feed = 2 * (3 if gated else 2) * model.ffn_dim / t
    return tokens * (stream + inside + feed * (1.0 if layout.fused or not gated else 4 / 3))


def kept_layer_bytes(work: Workload, layout: Layout) -> float:
    """What one layer keeps from forward to backward under `layout.recompute`."""
    model, t = work.model, layout.tp
    tokens = layout.micro_batch * work.seq_len / layout.cp
    whole = whole_layer_bytes(work, layout)
    boundary = 2 * tokens * model.dim / (t if layout.sequence_parallel else 1)
    if layout.recompute == "full":
        return boundary
    if layout.recompute == "half":
        # The layer's input, what attention gives, and every other product's result.
        kv = model.num_kv_heads * model.head_dim
        gated = model.family not in ("gpt", "bert")
        products = 3 * model.dim + 2 * kv + (2 if gated else 1) * model.ffn_dim
        return boundary + 2 * tokens * (model.dim + products / 2) / t
    if layout.recompute == "selective" and layout.attention == "unfused":
        return whole - 5 * model.num_heads * work.seq_len * tokens / t
    return whole
