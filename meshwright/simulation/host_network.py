"""What the network between hosts adds to a step whose ranks are CPU processes: bytes over a rate, and a latency.

Owns which collectives of a layout leave a host. What ranks compute and copy is `simulation/host.py`'s.
Simplifications: nothing is hidden behind computations; all groups that leave a host share its network evenly; gathers
and reductions go round in rings.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.simulation.collectives import ranks_in_node
from meshwright.simulation.job import (
    Cluster,
    Layout,
    Workload,
    data_stride,
    num_microbatches,
    pipeline_stride,
)
from meshwright.simulation.machinery import Wire

_FLOAT = 4
# Of a message between two hosts over TCP.
_LATENCY_SECONDS = 1e-4
_NO_WIRE = Wire()


@dataclass(frozen=True)
class NetworkSeconds:
    """Of a step. Attributes: tensor, context, weights, gradients, as parts of a step; wire between two stages."""

    tensor: float = 0.0
    context: float = 0.0
    weights: float = 0.0
    gradients: float = 0.0
    wire: Wire = _NO_WIRE


def network_seconds(work: Workload, layout: Layout, cluster: Cluster, numel: float) -> NetworkSeconds:
    """What leaves a host in a step; `numel` parameters of a rank before `zero` cuts them."""
    if cluster.num_devices <= cluster.devices_per_node:
        return NetworkSeconds()
    m, model = num_microbatches(work, layout), work.model
    tokens = layout.micro_batch * work.seq_len // layout.cp
    stream = float(_FLOAT * tokens * model.dim)
    passes = m * model.num_layers / layout.pp

    def over(ranks: int, stride: int, num_bytes: float, *, rounds: int = 1) -> float:
        inside = ranks_in_node(cluster, ranks=ranks, stride=stride)
        if inside >= ranks:
            return 0.0
        share = cluster.nic_bytes_per_second / cluster.devices_per_node * inside
        return rounds * (_LATENCY_SECONDS * (ranks - 1) + num_bytes * (ranks - 1) / ranks / share)

    repeats = 2 if layout.recompute == "full" else 1
    tensor = passes * (2 + 2 * repeats) * over(layout.tp, 1, stream, rounds=2)
    keys = 2 * _FLOAT * tokens * layout.cp * max(1, model.num_kv_heads // layout.tp) * model.head_dim
    context = passes * (repeats + 2) * over(layout.cp, layout.tp, float(keys))
    size, stride, n = _FLOAT * numel, data_stride(layout), layout.num_shards
    # Of zero3 weights are gathered for forward and for backward: hosts share no memory.
    weights = m * 3 * over(n, stride, size) if layout.zero == 3 else 0.0
    gradients = {
        0: over(n, stride, size, rounds=2),
        1: over(n, stride, size, rounds=2),
        2: (m + 1) * over(n, stride, size),
    }.get(layout.zero, 0.0)
    wire = _NO_WIRE
    if layout.pp > 1 and layout.pp * pipeline_stride(layout) > cluster.devices_per_node:
        rate = cluster.nic_bytes_per_second / min(cluster.devices_per_node, pipeline_stride(layout))
        wire = Wire(_LATENCY_SECONDS, stream / layout.tp / rate)
    return NetworkSeconds(tensor, context, weights, gradients, wire)
