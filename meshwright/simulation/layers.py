"""Seconds of one transformer layer, of the head and of the embedding, forward and backward, on one device.

Bytes of elementwise passes count each tensor that a fused kernel reads or writes, in 16 bits, and masks of dropout in
one byte; layers that are not fused move 1.6 times as much. Attention written out keeps its scores in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.presets.calibration import Calibration
from meshwright.simulation.collectives import collective_seconds
from meshwright.simulation.job import Cluster, Layout, Workload, data_stride
from meshwright.simulation.kernels import flash_seconds, matmul_seconds, stream_seconds

_UNFUSED_TRAFFIC = 1.6
_FLASH_BACKWARD = 2.5
# A scale for the whole tensor: read 16 bits, write 8. For each row: read for the scales, and all of it again for the
# transposed operand of backward, whose rows are others.
_CAST_BYTES = {"fp8": 3.0, "fp8-rows": 10.0}
# Kernels of a layer's forward: in one graph, with fused attention, and written out. Backward issues two for each.
_LAUNCHES = {"fused": 14, "engine": 14, "flash": 22, "unfused": 28}
# Of a micro-batch beside its layers, with what makes its batch.
_LAUNCHES_OF_ENDS = 100
# Where a launch waits for the end of its kernel, the device waits for the host before the next one.
_BLOCKED_SECONDS = 50e-6
# FlashAttention-3 over FlashAttention-2 on H100 (arXiv 2407.08608: 1.5 to 2.0).
_ENGINE_RATE = 1.6


@dataclass(frozen=True)
class LayerSeconds:
    """Of one micro-batch: forward, gradients of inputs, gradients of weights, and what runs again; communication
    that is not hidden is `tensor` and `context`, for all passes together, with those of what runs again."""

    forward: float
    inputs: float
    weights: float
    again: float
    tensor: float
    context: float

    @property
    def compute(self) -> float:
        """All passes."""
        return self.forward + self.inputs + self.weights + self.again


@dataclass(frozen=True)
class Products:
    """Seconds of matrix products: forward, for gradients of inputs, for gradients of weights."""

    forward: float
    inputs: float
    weights: float


@lru_cache(maxsize=50_000)
def products_seconds(
    cluster: Cluster, fit: Calibration, shapes: tuple[tuple[int, int, int], ...], precision: str
) -> Products:
    """Seconds of products of shapes (m, n, k) and of their gradients."""

    def total(order: tuple[int, int, int]) -> float:
        return sum(
            matmul_seconds(cluster.machine, fit, (s[order[0]], s[order[1]], s[order[2]]), precision=precision)
            for s in shapes
        )

    return Products(total((0, 1, 2)), total((0, 2, 1)), total((2, 1, 0)))


def layer_seconds(work: Workload, layout: Layout, cluster: Cluster, fit: Calibration) -> LayerSeconds:
    """Seconds of one layer and one micro-batch."""
    model, t = work.model, layout.tp
    tokens = layout.micro_batch * work.seq_len // layout.cp
    gated = model.family not in ("gpt", "bert")
    kv = max(model.num_kv_heads, t) * model.head_dim
    ffn = -(-model.ffn_dim // t)
    shapes = (
        (tokens, (model.dim + 2 * kv) // t, model.dim),
        (tokens, model.dim, model.dim // t),
        (tokens, ffn * (2 if gated else 1), model.dim),
        (tokens, model.dim, ffn),
    )
    linear = products_seconds(cluster, fit, shapes, layout.precision)
    around = _elementwise(work, layout, cluster, fit, tokens)
    core = _attention(work, layout, cluster, fit)
    forward = linear.forward + around[0] + core[0]
    inputs = linear.inputs + around[1] + core[1]
    again = {
        "none": 0.0,
        "selective": core[0] if layout.attention == "unfused" else around[0],
        "half": 0.5 * linear.forward + around[0],
        "full": forward,
    }[layout.recompute]
    tensor = _tensor_seconds(work, layout, cluster, fit, linear)
    context = _context_seconds(work, layout, cluster, fit, core[0])
    return _issued(LayerSeconds(forward, inputs, linear.weights, again, tensor, context), layout, fit)


def _issued(layer: LayerSeconds, layout: Layout, fit: Calibration) -> LayerSeconds:
    """A layer takes at least what the host takes to issue its kernels; where launches block, both one after another."""
    launches = _LAUNCHES["fused" if layout.fused and layout.attention != "unfused" else layout.attention]
    again = {"none": 0.0, "selective": 0.2, "half": 0.5, "full": 1.0}[layout.recompute]
    if layout.blocking_launches:
        waited = launches * _BLOCKED_SECONDS
    else:
        exchanges = 4 + 2 * again if layout.tp > 1 else 0
        host = fit.launch_seconds * ((3 + again) * launches + 2 * exchanges)
        waited = max(0.0, host - layer.compute - layer.tensor - layer.context) / (3 + again)
    return replace(
        layer,
        forward=layer.forward + waited,
        inputs=layer.inputs + waited,
        weights=layer.weights + waited,
        again=layer.again + again * waited,
    )


def _elementwise(
    work: Workload, layout: Layout, cluster: Cluster, fit: Calibration, tokens: int
) -> tuple[float, float]:
    """Norms, residuals, dropout, activation, copies of heads: forward and backward."""
    model, t = work.model, layout.tp
    whole = t if layout.sequence_parallel else 1
    dropout = layout.attention == "unfused"  # models before fused attention train with dropout
    stream = (20 + (2 if dropout else 0)) * model.dim / whole
    inner = 16 * model.dim / t
    branches = 3 if model.family not in ("gpt", "bert") else 2
    activation = 2 * branches * model.ffn_dim / t
    traffic = 1.0 if layout.fused else _UNFUSED_TRAFFIC
    cast = _CAST_BYTES.get(layout.precision, 0.0)
    casts = cast * (2 * model.dim / whole + model.dim / t + model.ffn_dim / t)
    kernels = 8 if layout.fused else 14
    moved = tokens * ((stream + inner + activation) * traffic + casts)
    forward = stream_seconds(cluster.machine, fit, moved, kernels=kernels)
    return forward, stream_seconds(cluster.machine, fit, 1.5 * moved, kernels=2 * kernels)


def _attention(work: Workload, layout: Layout, cluster: Cluster, fit: Calibration) -> tuple[float, float]:
    """Attention's core, forward and backward."""
    model = work.model
    heads = max(1, model.num_heads // layout.tp)
    rows, columns, head = work.seq_len // layout.cp, work.seq_len, model.head_dim
    batch = layout.micro_batch * heads
    if layout.attention != "unfused":
        flops = 4.0 * batch * rows * columns * head * (0.5 if model.causal else 1.0)
        seconds = flash_seconds(cluster.machine, fit, flops)
        # On Hopper and later; before, the portable kernels are the generation's own.
        seconds /= _ENGINE_RATE if layout.attention == "engine" and "fp8" in cluster.machine.flops else 1.0
        return seconds, _FLASH_BACKWARD * seconds
    scores = matmul_seconds(cluster.machine, fit, (rows, columns, head), batch=batch)
    mixed = matmul_seconds(cluster.machine, fit, (rows, head, columns), batch=batch)
    passes = stream_seconds(cluster.machine, fit, 9.0 * batch * rows * columns, kernels=3)
    back = stream_seconds(cluster.machine, fit, 11.0 * batch * rows * columns, kernels=3)
    return scores + mixed + passes, 2 * (scores + mixed) + back


def _tensor_seconds(
    work: Workload, layout: Layout, cluster: Cluster, fit: Calibration, linear: Products
) -> float:
    """What tp's collectives add: two all-reduces forward, two backward beside weight gradients, again if repeated."""
    if layout.tp == 1:
        return 0.0
    tokens = layout.micro_batch * work.seq_len // layout.cp
    one = collective_seconds(cluster, fit, 2.0 * tokens * work.model.dim, ranks=layout.tp, passes=2)
    forward = 2 * one
    if layout.overlap_tensor:
        forward = max(0.3 * forward, forward - fit.overlap * linear.forward)
    backward = max(0.0, 2 * one - fit.overlap * linear.weights)
    repeats = {"none": 1.0, "selective": 1.0, "half": 1.5, "full": 2.0}[layout.recompute]
    return forward * repeats + backward


def _context_seconds(
    work: Workload, layout: Layout, cluster: Cluster, fit: Calibration, core: float
) -> float:
    """What cp adds: keys and values go round beside attention, once forward and twice backward; or all of them are
    gathered before it; or queries, keys, values and results change places between ranks, heads for tokens."""
    if layout.cp == 1:
        return 0.0
    model = work.model
    width = 2 * max(1, model.num_kv_heads // layout.tp) * model.head_dim
    tokens = layout.micro_batch * work.seq_len
    if layout.cp_kind == "ulysses":
        # Each rank keeps 1 of cp parts: the slowest level carries (cp - 1) / cp of a rank's own tensors.
        own = 2.0 * tokens / layout.cp * (2 * model.dim / layout.tp + width)
        forward = backward = collective_seconds(
            cluster, fit, own, ranks=layout.cp, stride=data_stride(layout)
        )
    else:
        ring = collective_seconds(
            cluster, fit, 2.0 * tokens * width, ranks=layout.cp, stride=data_stride(layout)
        )
        hidden = fit.overlap * core if layout.cp_kind == "ring" else 0.0
        forward = max(0.0, ring - hidden)
        backward = max(0.0, 2 * ring - _FLASH_BACKWARD * hidden)
    return forward * (2 if layout.recompute == "full" else 1) + backward


def head_seconds(work: Workload, layout: Layout, cluster: Cluster, fit: Calibration) -> float:
    """Seconds of the output projection and the loss, forward and backward, of one micro-batch."""
    tokens = layout.micro_batch * work.seq_len // layout.cp
    vocab = -(-work.model.vocab_size // layout.tp)
    vocab += -vocab % 64  # padded, as all of the published systems do
    done = products_seconds(cluster, fit, ((tokens, vocab, work.model.dim),), "bf16")
    loss = stream_seconds(cluster.machine, fit, 24.0 * tokens * vocab, kernels=8)
    return max(done.forward + done.inputs + done.weights + loss, _LAUNCHES_OF_ENDS * fit.launch_seconds)


def layer_numel(work: Workload) -> float:
    """Parameters of one layer's matrices."""
    model = work.model
    gated = model.family not in ("gpt", "bert")
    kv = model.num_kv_heads * model.head_dim
    return 2 * model.dim * (model.dim + kv) + (3 if gated else 2) * model.dim * model.ffn_dim
