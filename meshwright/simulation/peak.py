"""Memory of the fullest rank under any layout, by formulas, with its parts.

States: weights in 16 bits, gradients in 2 or 4 bytes, masters and two moments in float32, each cut by what `zero`
shares. Activations: of attention written out, the paper's layer (`meshwright/simulation/memory.py`, with dropout);
of fused attention, every tensor that backward reads, once, in 16 bits: inputs and results of two norms, queries, keys,
values and the mixed values, and what the feed-forward part keeps.

Source: ZeRO (arXiv 1910.02054), section 3; Korthikanti et al. 2022 (arXiv 2205.05198), sections 4 and 5.
Simplifications: the allocator wastes nothing (`fits` of `meshwright/simulation/prediction.py` leaves room for what it
does); states are of the stage with most, activations of the stage with most, which need not be one.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.simulation.job import Cluster, Layout, Workload, num_microbatches
from meshwright.simulation.layers import layer_numel
from meshwright.simulation.memory import Split, layer_activation_bytes, micro_batches_in_flight
from meshwright.simulation.step import embedding_counts, layers_of_stages, stage_numel

_GIB = 2**30
# A device's context with loaded kernels, which a framework does not count: MiB on a V100 and an A100 (BigScience),
# 0.5 to 1.8 GiB elsewhere (ml-engineering).
_CONTEXT_MIB = {"v100": 1113, "v100-16": 1113}
_OTHER_CONTEXT_MIB = 1573
# Of the groups of one axis: a library's own buffers, which a framework does not count.
_COMMUNICATOR_BYTES = 0.5 * _GIB


@dataclass(frozen=True)
class PeakBytes:
    """Bytes of the fullest rank; `peak` is their sum.

    Attributes:
        weights, gradients, optimizer: states that stay.
        gathered: what zero3 holds for a while: weights of two layers, or the head's with their gradients.
        activations: kept for backward, and of the layer that runs again.
        logits: of one micro-batch, where they are made.
        communication: a framework's own buffers for collectives.
        reserve: the device's context, and buffers of its collectives' library: what a framework does not count.
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
    if layout.zero < 3 or shards == 1:
        return States(*parts, 0.0)
    if layout.holds_stage and layout.pp > 1:
        return States(*parts, (2.0 + 4.0) * numel)
    return States(*parts, 2 * 2.0 * layer_numel(work) / layout.tp)


def peak_bytes(
    work: Workload,
    layout: Layout,
    cluster: Cluster | None = None,
    *,
    pieces: HeldPieces | None = None,
    of_first_stage: bool = False,
) -> PeakBytes:
    """Predict the peak of the fullest rank.

    Args:
        work: the model and its batch.
        layout: how it is carried out.
        cluster: not needed but for devices that are not GPUs.
        pieces: what is known of it already.
        of_first_stage: what the first stage of a pipeline holds, instead of the stage that holds most.
    """
    pieces = pieces or HeldPieces(
        states_of(work, layout), kept_layer_bytes(work, layout), whole_layer_bytes(work, layout)
    )
    activations, logits, gathered = _fullest_moment(
        work, layout, pieces, of_first_stage=of_first_stage and layout.pp > 1
    )
    on_cpu = cluster is not None and cluster.machine.name == "cpu"
    num_axes = (layout.dp > 1) + (layout.tp > 1) + (layout.pp > 1) + (layout.cp > 1)
    return PeakBytes(
        pieces.states.weights,
        pieces.states.gradients,
        pieces.states.optimizer,
        gathered,
        activations,
        logits,
        0.0 if on_cpu else layout.bucket_bytes,
        0.0 if on_cpu else context_bytes(cluster) + _COMMUNICATOR_BYTES * num_axes,
    )


def context_bytes(cluster: Cluster | None) -> int:
    """A device's context with loaded kernels."""
    name = cluster.machine.name if cluster else ""
    return _CONTEXT_MIB.get(name, _OTHER_CONTEXT_MIB) * 2**20


def _fullest_moment(
    work: Workload, layout: Layout, pieces: HeldPieces, *, of_first_stage: bool
) -> tuple[float, float, float]:
    """Activations, logits and gathered weights at the peak: while the loss is computed, or while a layer runs again,
    when logits are gone."""
    again = pieces.whole if layout.recompute in ("full", "half") else 0.0
    again += _working_bytes(work, layout)
    kept = _kept(work, layout, pieces)
    gathered = pieces.states.gathered
    if of_first_stage:
        return kept.first + again, 0.0, gathered
    ends = _last_stream_bytes(work, layout)
    at_loss = (kept.last + ends, _logit_bytes(work, layout), _gathered_at_loss(work, layout, gathered))
    later = (max(kept.first, kept.second, kept.last) + again, 0.0, gathered)
    return max(at_loss, later, key=sum)


def _working_bytes(work: Workload, layout: Layout) -> float:
    """Gradients inside one layer while its backward runs: of what the feed-forward part keeps, or, when that is
    gone, of scores that are written out; and of the stream."""
    model, t = work.model, layout.tp
    tokens = layout.micro_batch * work.seq_len / layout.cp
    feed = 2 * (2 if model.family in ("gpt", "bert") else 3) * tokens * model.ffn_dim / t
    scores = 2 / 5 * _scores_bytes(work, layout)
    return max(feed, scores - feed) + 2 * tokens * model.dim


def _logit_bytes(work: Workload, layout: Layout) -> float:
    tokens = layout.micro_batch * work.seq_len / layout.cp
    return layout.logit_bytes * tokens * work.model.vocab_size / layout.tp


def _gathered_at_loss(work: Workload, layout: Layout, gathered: float) -> float:
    """The head's weight and its gradient, and a layer's weights, where they are gathered one by one."""
    if not gathered or (layout.holds_stage and layout.pp > 1):
        return gathered
    return ((2.0 + 2.0) * work.model.vocab_size * work.model.dim + 2.0 * layer_numel(work)) / layout.tp


def _last_stream_bytes(work: Workload, layout: Layout) -> float:
    """Input and result of the last norm."""
    stream = 2.0 * layout.micro_batch * work.seq_len / layout.cp * work.model.dim
    part = stream / (layout.tp if layout.sequence_parallel else 1)
    return part + (stream if layout.keeps_gathered else part)


@dataclass(frozen=True)
class _Kept:
    """Bytes that stages hold between forward and backward; `second` is 0 where it holds no more than the first."""

    first: float
    second: float
    last: float


def _kept(work: Workload, layout: Layout, pieces: HeldPieces) -> _Kept:
    full, last = layers_of_stages(work, layout)
    m = num_microbatches(work, layout)
    sent = 0.0
    if layout.keeps_outputs and layout.pp > 1:
        sent = 2.0 * layout.micro_batch * work.seq_len * work.model.dim / layout.cp

    def of_stage(stage: int, layers: float, outputs: float) -> float:
        return (pieces.kept * layers + outputs) * min(in_flight(layout, stage, m), m)

    at_last = of_stage(layout.pp - 1, last, 0.0)
    if embedding_counts(work, layout) and not layout.half_layers:
        # The embedding stands for a layer of the first stage.
        return _Kept(of_stage(0, full - 1, sent), of_stage(1, full, sent), at_last)
    return _Kept(of_stage(0, full, sent), 0.0, at_last)


def in_flight(layout: Layout, stage: int, m: int) -> float:
    """Micro-batches whose activations a stage of the pipeline holds at most."""
    p = layout.pp
    if p == 1:
        return 1.0
    if layout.keeps:
        return float(layout.keeps)
    if layout.schedule == "gpipe":
        return float(m)
    # What waits for gradients of its weights is still held, so that all stages of these hold as much as the first.
    everywhere = {"zb-h1": p, "zb-h2": 2 * p - 1, "zb-v": p, "dualpipe": p + 1}
    if layout.schedule in everywhere:
        return float(everywhere[layout.schedule])
    chunks = layout.chunks if layout.schedule == "interleaved" else 1
    return max(1.0, micro_batches_in_flight(Split(1, p, chunks), stage=stage))


def whole_layer_bytes(work: Workload, layout: Layout) -> float:
    """What one layer keeps where nothing runs again."""
    model, t = work.model, layout.tp
    tokens = layout.micro_batch * work.seq_len / layout.cp
    is_kept = layout.keeps_gathered and layout.sequence_parallel
    regathered = 4 * tokens * model.dim * (1 - 1 / t) if is_kept else 0.0
    if layout.attention == "unfused" and model.family == "gpt":
        split = Split(tensor=t, sequence_parallel=layout.sequence_parallel)
        whole = layer_activation_bytes(
            model, seq_len=work.seq_len, micro_batch=layout.micro_batch, split=split, kept="none"
        )
        return whole / layout.cp + regathered
    stream = 8 * model.dim / (t if layout.sequence_parallel else 1)
    kv = model.num_kv_heads * model.head_dim
    inside = (4 * model.dim + 4 * kv) / t
    gated = model.family not in ("gpt", "bert")
    if gated and not layout.fused:
        # Rotated and laid out anew for attention, while the joint product's result stays.
        inside += (2 * model.dim + 4 * kv) / t
    feed = 2 * (3 if gated else 2) * model.ffn_dim / t
    feed *= 1.0 if layout.fused or not gated else 4 / 3
    if layout.attention == "engine" and layout.precision.startswith("fp8"):
        # Such libraries keep inputs of products as they multiplied them; other frameworks keep 16 bits.
        stream *= 6 / 8
        inside -= model.dim / t
        feed -= model.ffn_dim / t
    return tokens * (stream + inside + feed) + regathered + _scores_bytes(work, layout)


def _scores_bytes(work: Workload, layout: Layout) -> float:
    """Softmax, its dropped result and the mask, of attention that is written out."""
    if layout.attention != "unfused":
        return 0.0
    tokens = layout.micro_batch * work.seq_len / layout.cp
    return 5 * work.model.num_heads * work.seq_len * tokens / layout.tp


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
    if layout.recompute == "selective":
        return whole - _scores_bytes(work, layout)
    return whole
