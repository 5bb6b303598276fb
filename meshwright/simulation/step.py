"""Seconds of one training step of a decoder transformer under any layout, with its parts.

Simplifications: all ranks are equally fast; schedules count by their longest paths (`meshwright/schedule/bubble.py`),
stages being equal (`meshwright/simulation/timeline.py` runs one event by event); the loss is computed where the last
layer is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from meshwright.presets.calibration import Calibration, calibration_of
from meshwright.presets.counts import matmul_flops_per_token, num_parameters
from meshwright.schedule.bubble import extra_seconds
from meshwright.simulation.collectives import collective_seconds, message_seconds
from meshwright.simulation.job import (
    Cluster,
    Layout,
    Workload,
    data_stride,
    num_microbatches,
    pipeline_stride,
)
from meshwright.simulation.kernels import stream_seconds
from meshwright.simulation.layers import LayerSeconds, head_seconds, layer_numel, layer_seconds

# An update reads a gradient, reads and writes a master and two moments, and writes a weight.
_UPDATE_BYTES = 30
# A product that adds to its sum reads and writes 4 bytes of it where it would write 2, and one in 16 bits is read and
# added to another; sums of their own buffer in float32 are a pass more, which also clears what it read.
_SUM_BYTES = 6
_OWN_SUM_BYTES = 12
# Communication takes units and memory of the computations that it runs beside (Galvatron measured 1.13).
_SLOWDOWN = 0.1


@dataclass(frozen=True)
class StepSeconds:
    """Parts of one step; `total` is their sum.

    Attributes:
        compute: of the slowest stage, all micro-batches.
        recompute: of it, what ran again; not a summand.
        bubble: waiting for the pipeline to fill and drain, and for slower stages.
        tensor, context: collectives of tp and cp that are not hidden.
        pipeline: messages between stages that are not hidden.
        weights: gathers of weights and reductions of gradients that are not hidden, every micro-step (zero3).
        gradients: the reduction at the end of a step, and the gather of new weights.
        optimizer: the update.
    """

    compute: float
    recompute: float
    bubble: float
    tensor: float
    context: float
    pipeline: float
    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        parts = (self.compute, self.bubble, self.tensor, self.context, self.pipeline, self.weights)
        return sum(parts) + self.gradients + self.optimizer


def stage_layers(num_layers: int, num_stages: int, *, halves: bool = False) -> tuple[float, float]:
    """Layers of the fullest stage and of the last one, which has the head as well.

    Where the layers do not divide and with embedding and head counted as one each they do, first and last stages have
    one less. With `halves` half of a layer may stand alone.
    """
    if halves:
        full, last = stage_layers(2 * num_layers, num_stages)
        return full / 2, last / 2
    if num_stages == 1:
        return float(num_layers), float(num_layers)
    if num_layers % num_stages == 0:
        return num_layers / num_stages, num_layers / num_stages
    if (num_layers + 2) % num_stages == 0:
        full = (num_layers + 2) // num_stages
        return float(full), float(full - 1)
    full = -(-num_layers // num_stages)
    return float(full), float(num_layers // num_stages)


@dataclass(frozen=True)
class Sharing:
    """What data-parallel ranks exchange and update, before anything is hidden, in seconds.

    Attributes:
        gather, scatter: weights and gradients of one layer and micro-step (zero3).
        micro: the reduction of each micro-step but the last (zero2).
        last: reductions at the end of a step.
        spread: the gather of new weights.
        optimizer: the update.
        sums: adding gradients of one layer and micro-step to those before.
    """

    gather: float
    scatter: float
    micro: float
    last: float
    spread: float
    optimizer: float
    sums: float


@dataclass(frozen=True)
class Pieces:
    """What many layouts have in common.

    Attributes:
        layer: differs with tp, cp, micro-batch, recomputation, sequence parallelism, kind of attention and rank order.
        head: likewise.
        message: seconds between neighbouring stages; with pp as well.
        sharing: with degrees, zero, shard and rank order.
    """

    layer: LayerSeconds
    head: float
    message: float
    sharing: Sharing


def pieces_of(work: Workload, layout: Layout, cluster: Cluster, fit: Calibration) -> Pieces:
    """All of a layout's pieces."""
    return Pieces(
        layer_seconds(work, layout, cluster, fit),
        head_seconds(work, layout, cluster, fit),
        one_message_seconds(work, layout, cluster, fit),
        sharing_seconds(work, layout, cluster, fit),
    )


def step_seconds(
    work: Workload,
    layout: Layout,
    cluster: Cluster,
    fit: Calibration | None = None,
    *,
    pieces: Pieces | None = None,
) -> StepSeconds:
    """Predict one step.

    Args:
        work: the model and its batch.
        layout: how it is carried out; its product must be the cluster's devices.
        cluster: where.
        fit: constants other than the machine's own.
        pieces: `pieces_of` the layout, where they are known.
    """
    fit = fit or calibration_of(cluster.machine)
    pieces = pieces or pieces_of(work, layout, cluster, fit)
    layer, head = pieces.layer, pieces.head
    m = num_microbatches(work, layout)
    weights = weights_seconds(layout, fit, layer, pieces.sharing)
    sums = pieces.sharing.sums
    one = layer.compute + layer.tensor + layer.context + weights + sums
    layers, extra = slowest_stage(layers_of_stages(work, layout), one, head)
    # Of a mean stage: the slowest one's own time is in the micro-batches.
    mean = passes_seconds(
        layer, pieces.sharing, weights, (work.model.num_layers / layout.pp, head / layout.pp)
    )
    return StepSeconds(
        compute=m * (layers * (layer.compute + sums) + extra),
        recompute=m * layers * layer.again,
        bubble=extra_seconds(
            layout.schedule, layout.pp, m, mean, chunks=layout.chunks, joined=layout.joined_steps
        ),
        tensor=m * layers * layer.tensor,
        context=m * layers * layer.context,
        # Of one micro-batch on a stage: one forward and one backward for each chunk.
        pipeline=(m + layout.pp - 1) * 2 * layout.chunks * pieces.message,
        weights=m * layers * weights,
        gradients=_gradient_seconds(layout, m, layers * one + extra, pieces.sharing),
        optimizer=pieces.sharing.optimizer,
    )


def layers_of_stages(work: Workload, layout: Layout) -> tuple[float, float]:
    """Layers of the fullest stage and of the last one, under a layout."""
    num_layers = work.model.num_layers
    if layout.counts_head and layout.pp > 1:
        head = work.model.vocab_size * work.model.dim / layer_numel(work)
        full = min(ceil((num_layers + head) / layout.pp), num_layers)
        return float(full), float(max(0, num_layers - full * (layout.pp - 1)))
    return stage_layers(num_layers, layout.pp, halves=layout.half_layers)


def embedding_counts(work: Workload, layout: Layout) -> bool:
    """Whether the embedding stands for a layer of the first stage, and the head for one of the last."""
    num_layers, pp = work.model.num_layers, layout.pp
    return not layout.counts_head and num_layers % pp != 0 and (num_layers + 2) % pp == 0


def slowest_stage(layers: tuple[float, float], one: float, head: float) -> tuple[float, float]:
    """Layers of the slowest stage, and what it does besides: the head where the last stage is the slowest.

    Args:
        layers: of the fullest stage and of the last one.
        one, head: seconds of a layer and of the head.
    """
    full, last = layers
    return (last, head) if last * one + head > full * one else (full, 0.0)


def passes_seconds(
    layer: LayerSeconds, sharing: Sharing, weights: float, part: tuple[float, float]
) -> tuple[float, float, float]:
    """Forward, gradients of inputs and of weights of a part (layers, seconds of the head), one micro-batch.

    What is not hidden of communication is waited for half in forward, half with gradients of inputs; the head's
    products are a third each.
    """
    beside = (layer.tensor + layer.context + weights) / 2
    layers, third = part[0], part[1] / 3
    return (
        layers * (layer.forward + beside) + third,
        layers * (layer.inputs + layer.again + beside) + third,
        layers * (layer.weights + sharing.sums) + third,
    )


def one_message_seconds(work: Workload, layout: Layout, cluster: Cluster, fit: Calibration) -> float:
    """An activation, or its gradient, of one micro-batch from a stage to its neighbour."""
    if layout.pp == 1:
        return 0.0
    tokens = layout.micro_batch * work.seq_len // layout.cp
    num_bytes = 2.0 * tokens * work.model.dim / layout.tp
    return message_seconds(cluster, fit, num_bytes, stride=pipeline_stride(layout))


def weights_seconds(layout: Layout, fit: Calibration, layer: LayerSeconds, sharing: Sharing) -> float:
    """What a layer and micro-batch wait for weights of zero3, beside its computation."""
    if not sharing.gather:
        return 0.0
    hidden = fit.overlap if layout.overlap_gradients else 0.0
    forward = exposed_seconds(sharing.gather, hidden * (layer.forward + layer.tensor / 2))
    behind = layer.inputs + layer.weights + layer.again + layer.tensor / 2
    return forward + exposed_seconds(sharing.gather + sharing.scatter, hidden * behind)


def exposed_seconds(seconds: float, room: float) -> float:
    """What communication costs beside computations that have room for so much: those slow down by a tenth of it."""
    return seconds - (1 - _SLOWDOWN) * min(seconds, room)


def stage_numel(work: Workload, layout: Layout) -> float:
    """Parameters of the fullest rank, before any of `zero`'s cuts."""
    model = work.model
    if layout.pp == 1:
        return num_parameters(model) / layout.tp
    full, _ = layers_of_stages(work, layout)
    ends = full - 1 if embedding_counts(work, layout) else full
    vocabulary = model.vocab_size * model.dim
    held = max(full * layer_numel(work), ends * layer_numel(work) + vocabulary) / layout.tp
    # A rank of the bidirectional schedule holds a stage of either direction.
    return 2 * held if layout.schedule == "dualpipe" else held


def sharing_seconds(work: Workload, layout: Layout, cluster: Cluster, fit: Calibration) -> Sharing:
    """Collectives of a layout's data-parallel ranks, and their updates."""
    numel = stage_numel(work, layout)
    shards = layout.num_shards if layout.zero else 1
    optimizer = _UPDATE_BYTES * numel / shards / (cluster.machine.memory_bandwidth * fit.memory)
    ranks, stride = layout.dp * layout.cp, data_stride(layout)
    sums = _sum_seconds(work, layout, cluster, fit)
    if ranks == 1:
        return Sharing(0.0, 0.0, 0.0, 0.0, 0.0, optimizer, sums)

    def seconds(num_bytes: float, *, over: int = ranks, away: int = stride, passes: int = 1) -> float:
        return collective_seconds(cluster, fit, num_bytes, ranks=over, stride=away, passes=passes)

    grads = layout.gradient_bytes * numel
    if layout.zero == 0:
        return Sharing(0.0, 0.0, 0.0, seconds(grads, passes=2), 0.0, optimizer, sums)
    # Copies sum their shards of gradients once a step.
    copies = ranks // shards
    size = 4.0 if layout.zero == 3 else layout.gradient_bytes
    last = seconds(size * numel / shards, over=copies, away=stride * shards, passes=2)
    if layout.zero == 3:
        one = layer_numel(work) / layout.tp
        way = _by_one_card(cluster) if layout.one_card else cluster
        gather, scatter = (
            collective_seconds(way, fit, size * one, ranks=shards, stride=stride)
            for size in (2.0, layout.gradient_bytes)
        )
        return Sharing(gather, scatter, 0.0, last, 0.0, optimizer, sums)
    spread = seconds(2.0 * numel, over=shards)
    if layout.zero == 1 and layout.reduces_whole:
        return Sharing(0.0, 0.0, 0.0, seconds(grads, passes=2), spread, optimizer, sums)
    reduce = seconds(grads, over=shards)
    micro = reduce if layout.zero == 2 else 0.0
    return Sharing(0.0, 0.0, micro, reduce + last, spread, optimizer, sums)


def _by_one_card(cluster: Cluster) -> Cluster:
    return replace(cluster, nic_bytes_per_second=cluster.nic_bytes_per_second / cluster.devices_per_node)


def _sum_seconds(work: Workload, layout: Layout, cluster: Cluster, fit: Calibration) -> float:
    """Adding a layer's gradients of a micro-step to sums; where parts are reduced each time, only to the own part."""
    each = _OWN_SUM_BYTES if layout.accumulator_bytes else _SUM_BYTES
    numel = layer_numel(work) / layout.tp / (layout.num_shards if layout.zero >= 2 else 1)
    return stream_seconds(cluster.machine, fit, each * numel)


def _gradient_seconds(layout: Layout, m: int, stage: float, sharing: Sharing) -> float:
    """What is not hidden of the exchange: at the end, and with zero2 of each micro-step before the last, which keeps
    only parts of sums and reduces beside its own backward."""
    if layout.zero == 3:
        return sharing.last
    if not layout.overlap_gradients:
        return (m - 1) * sharing.micro + sharing.last + sharing.spread
    # Backward of one micro-batch; few of a device's units are busy with what goes to other nodes.
    hidden = 0.6 * stage
    earlier = (m - 1) * exposed_seconds(sharing.micro, hidden)
    # Forward of the next step.
    beside = hidden / 2 if layout.overlap_weights else 0.0
    return earlier + exposed_seconds(sharing.last, hidden) + exposed_seconds(sharing.spread, beside)


def model_flops(work: Workload) -> float:
    """FLOPs of a step without recomputation, attention's whole square counted."""
    per_token = matmul_flops_per_token(work.model, work.seq_len, causal=False)
    return per_token * work.global_batch * work.seq_len
