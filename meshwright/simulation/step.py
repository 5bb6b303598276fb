"""Seconds of one training step of a decoder transformer under any layout, with its parts.

Simplifications: all ranks are equally fast; schedules count by their closed forms of the bubble
(`meshwright/simulation/timeline.py` runs one event by event); the loss is computed where the last layer is.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.presets.calibration import Calibration, calibration_of
from meshwright.presets.counts import matmul_flops_per_token, num_parameters
from meshwright.simulation.collectives import collective_seconds, message_seconds
from meshwright.simulation.job import (
    Cluster,
    Layout,
    Workload,
    data_stride,
    num_microbatches,
    pipeline_stride,
)
from meshwright.simulation.layers import LayerSeconds, head_seconds, layer_numel, layer_seconds

# An update reads a gradient, reads and writes a master and two moments, and writes a weight.
_UPDATE_BYTES = 30


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


def step_seconds(
    work: Workload,
    layout: Layout,
    cluster: Cluster,
    fit: Calibration | None = None,
    *,
    parts: tuple[LayerSeconds, float] | None = None,
) -> StepSeconds:
    """Predict one step.

    Args:
        work: the model and its batch.
        layout: how it is carried out; its product must be the cluster's devices.
        cluster: where.
        fit: constants other than the machine's own.
        parts: seconds of a layer and of the head, of a layout that differs in schedule, zero and shard at most.
    """
    fit = fit or calibration_of(cluster.machine)
    layer, head = parts or (
        layer_seconds(work, layout, cluster, fit),
        head_seconds(work, layout, cluster, fit),
    )
    m = num_microbatches(work, layout)
    full, last = stage_layers(work.model.num_layers, layout.pp, halves=layout.half_layers)
    weights = _weights_seconds(work, layout, cluster, fit, layer)
    beside = layer.tensor + layer.context + weights
    one = layer.compute + beside
    ends_with_head = last * one + head > full * one
    layers, extra = (last, head) if ends_with_head else (full, 0.0)
    slowest = layers * one + extra
    mean = (work.model.num_layers * one + head) / layout.pp
    bubble = _bubble(layout, mean, layer, mean / one, m)
    message = _pipeline_seconds(work, layout, cluster, fit)
    return StepSeconds(
        compute=m * (layers * layer.compute + extra),
        recompute=m * layers * layer.again,
        bubble=bubble,
        tensor=m * layers * layer.tensor,
        context=m * layers * layer.context,
        pipeline=(m + layout.pp - 1) * message,
        weights=m * layers * weights,
        gradients=_gradient_seconds(work, layout, cluster, fit, slowest),
        optimizer=_optimizer_seconds(work, layout, cluster, fit),
    )


def _bubble(layout: Layout, mean: float, layer: LayerSeconds, layers: float, m: int) -> float:
    """Seconds that the slowest stage waits."""
    p = layout.pp
    if p == 1:
        return 0.0
    if layout.schedule == "serial":
        return (p - 1) * mean * m
    # A zero-bubble schedule fills the ramp with gradients of weights: W of each stage once (h1) or twice.
    times = {"zb-h1": 1, "zb-h2": 2, "zb-v": 3, "dualpipe": 3}.get(layout.schedule, 0)
    if times:
        spare = times * layer.weights * layers
        inputs_side = mean - layer.weights * layers
        return max(0.0, (p - 1) * (inputs_side - spare))
    return (p - 1) * mean / layout.chunks


def _pipeline_seconds(work: Workload, layout: Layout, cluster: Cluster, fit: Calibration) -> float:
    """What messages add to one micro-batch on a stage: one forward and one backward for each chunk."""
    if layout.pp == 1:
        return 0.0
    tokens = layout.micro_batch * work.seq_len // layout.cp
    num_bytes = 2.0 * tokens * work.model.dim / layout.tp
    one = message_seconds(cluster, fit, num_bytes, stride=pipeline_stride(layout))
    return 2 * layout.chunks * one


def _weights_seconds(
    work: Workload, layout: Layout, cluster: Cluster, fit: Calibration, layer: LayerSeconds
) -> float:
    """What a layer and micro-batch wait for weights of zero3, beside its computation."""
    if layout.zero < 3 or layout.num_shards == 1:
        return 0.0
    numel = layer_numel(work) / layout.tp
    gather = _group_seconds(work, layout, cluster, fit, 2.0 * numel)
    reduce = _group_seconds(work, layout, cluster, fit, float(layout.gradient_bytes) * numel)
    hidden = fit.overlap if layout.overlap_gradients else 0.0
    forward = max(0.0, gather - hidden * (layer.forward + layer.tensor / 2))
    behind = layer.inputs + layer.weights + layer.again + layer.tensor / 2
    return forward + max(0.0, gather + reduce - hidden * behind)


def _group_seconds(
    work: Workload, layout: Layout, cluster: Cluster, fit: Calibration, num_bytes: float
) -> float:
    return collective_seconds(cluster, fit, num_bytes, ranks=layout.num_shards, stride=data_stride(layout))


def stage_numel(work: Workload, layout: Layout) -> float:
    """Parameters of the fullest rank, before any of `zero`'s cuts."""
    model = work.model
    if layout.pp == 1:
        return num_parameters(model) / layout.tp
    full, _ = stage_layers(model.num_layers, layout.pp, halves=layout.half_layers)
    ends = full - 1 if (model.num_layers % layout.pp and (model.num_layers + 2) % layout.pp == 0) else full
    vocabulary = model.vocab_size * model.dim
    held = max(full * layer_numel(work), ends * layer_numel(work) + vocabulary) / layout.tp
    # A rank of the bidirectional schedule holds a stage of either direction.
    return 2 * held if layout.schedule == "dualpipe" else held


def _gradient_seconds(
    work: Workload, layout: Layout, cluster: Cluster, fit: Calibration, stage: float
) -> float:
    ranks = layout.dp * layout.cp
    if ranks == 1:
        return 0.0
    numel, earlier = stage_numel(work, layout), 0.0
    copies = ranks // layout.num_shards
    if layout.zero == 3:
        part = 4.0 * numel / layout.num_shards
        return collective_seconds(
            cluster, fit, part, ranks=copies, stride=data_stride(layout) * layout.num_shards, passes=2
        )
    grads = layout.gradient_bytes * numel
    if layout.zero == 0:
        seconds = collective_seconds(cluster, fit, grads, ranks=ranks, stride=data_stride(layout), passes=2)
    else:
        reduce = collective_seconds(cluster, fit, grads, ranks=ranks, stride=data_stride(layout))
        if layout.zero == 2:
            # Only parts of sums are kept, so that each micro-step reduces, the earlier ones beside its own backward.
            hidden = fit.overlap * 0.6 * stage if layout.overlap_gradients else 0.0
            earlier = (num_microbatches(work, layout) - 1) * max(0.0, reduce - hidden)
        seconds = reduce + collective_seconds(
            cluster, fit, 2.0 * numel, ranks=ranks, stride=data_stride(layout)
        )
    if layout.overlap_gradients:
        return earlier + max(0.1 * seconds, seconds - fit.overlap * 0.6 * stage)
    return earlier + seconds


def _optimizer_seconds(work: Workload, layout: Layout, cluster: Cluster, fit: Calibration) -> float:
    shards = layout.num_shards if layout.zero else 1
    numel = stage_numel(work, layout) / shards
    return _UPDATE_BYTES * numel / (cluster.machine.memory_bandwidth * fit.memory)


def model_flops(work: Workload) -> float:
    """FLOPs of a step without recomputation, attention's whole square counted."""
    per_token = matmul_flops_per_token(work.model, work.seq_len, causal=False)
    return per_token * work.global_batch * work.seq_len
