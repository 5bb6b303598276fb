"""Memory of a process of this host under any layout: what its blocks keep in float32, states, and the process itself.

A block of a gpt keeps, in floats a token: its input, both norms' results and the stream between (4 widths), queries,
keys, values and the mixed values (4), the inputs of GELU and of the second matrix (2 feed-forward widths). Two peaks
are compared: the backward of the loss, which holds logits, their logarithms and a gradient, and that of a block. About
as much as a block keeps lies in holes that the allocator does not use again (measured: blocks in plain torch).
Resident memory is counted: pages of neighbours that a rank reads in place are its own too.
Simplification: heads and rotations in float32.
"""

from __future__ import annotations

from meshwright.presets.host import HostProfile
from meshwright.simulation.host import num_parts, num_stages, rank_numel, stage_blocks
from meshwright.simulation.job import Layout, Workload, num_microbatches
from meshwright.simulation.layers import layer_numel
from meshwright.simulation.peak import PeakBytes, in_flight

_FLOAT = 4
# Two buckets of gradients are open at a time.
_BUCKET_BYTES = 25 << 20


def host_peak(work: Workload, layout: Layout, host: HostProfile) -> PeakBytes:
    """Predict the resident memory of the fullest process."""
    numel, n = rank_numel(work, layout), layout.num_shards
    size = _FLOAT * numel
    weights = size / (n if layout.zero == 3 else 1)
    gradients = size / (n if layout.zero >= 2 else 1)
    pool = _open_buckets(work, layout, size) if layout.zero >= 2 and n > 1 else 0.0
    optimizer = 2 * size / (n if layout.zero else 1)
    activations, logits = _activations(work, layout)
    mapped = _mapped(layout, size)
    holes = _FLOAT * layout.micro_batch * work.seq_len / layout.cp * block_floats(work, layout)
    known = weights + gradients + pool + optimizer + activations + logits + mapped + host.process_bytes
    return PeakBytes(
        weights=weights,
        gradients=gradients + pool,
        optimizer=optimizer,
        gathered=0.0,
        activations=activations,
        logits=logits,
        communication=mapped,
        # What runs taught is of the whole, and the process is what is known least.
        reserve=max(0.0, host.process_bytes + holes + (host.learned.memory - 1) * (known + holes)),
    )


def _open_buckets(work: Workload, layout: Layout, size: float) -> float:
    """Gradients that wait for their reduction: two buckets; of zero3 two blocks, and what is outside of blocks."""
    if layout.zero == 2:
        return min(size, 2.0 * _BUCKET_BYTES)
    outside = work.model.vocab_size * work.model.dim
    return min(size, _FLOAT * (2 * layer_numel(work) + outside) / layout.tp)


def _mapped(layout: Layout, size: float) -> float:
    """Pages of other ranks that collectives in place touch: the parts of gradients and of weights."""
    n = layout.num_shards
    if layout.dp * layout.cp == 1:
        return 0.0
    others = (n - 1) / n * size
    return others if layout.zero == 0 else 2 * others


def block_floats(work: Workload, layout: Layout) -> float:
    """What a block keeps for each token of a rank."""
    model, t = work.model, layout.tp
    kv = model.num_kv_heads * model.head_dim
    whole = t if layout.sequence_parallel else 1
    if model.family in ("gpt", "bert"):
        cut = 2 * model.dim + 2 * kv + 2 * model.ffn_dim
        return 4 * model.dim / whole + cut / t + model.num_heads / t + 4
    return 6 * model.dim / whole + (2 * model.dim + 2 * kv + 4 * model.ffn_dim) / t + model.num_heads / t + 2


def _activations(work: Workload, layout: Layout) -> tuple[float, float]:
    """(what blocks keep and use, logits) where they are most."""
    model, t = work.model, layout.tp
    tokens = layout.micro_batch * work.seq_len / layout.cp
    kept = block_floats(work, layout)
    extra = (1 if model.family in ("gpt", "bert") else 2) * model.ffn_dim / t
    if layout.recompute == "full":
        kept, extra = float(model.dim), kept + extra
    loss = 3 * model.vocab_size / t + model.dim
    m = num_microbatches(work, layout)
    if layout.pp == 1:
        blocks = model.num_layers * kept
        at_loss, at_block = blocks + model.dim, blocks + extra
        if at_loss + loss >= at_block:
            return _FLOAT * tokens * at_loss, _FLOAT * tokens * loss
        return _FLOAT * tokens * at_block, 0.0
    counts = stage_blocks(model.num_layers, num_stages(layout))
    parts = num_parts(layout)
    first = min(in_flight(layout, 0, m), m) * max(counts) * parts * kept + extra
    ends = min(in_flight(layout, layout.pp - 1, m), m) * counts[-1] * parts * kept + model.dim
    if first >= ends + loss:
        return _FLOAT * tokens * first, 0.0
    return _FLOAT * tokens * ends, _FLOAT * tokens * loss
