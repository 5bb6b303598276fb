"""Memory of a process of this host under any layout: what its blocks keep in float32, states, and the process itself.

A block of a gpt keeps, in floats a token: its input, both norms' results and the stream between (4 widths), queries,
keys, values and the mixed values (4), the inputs of GELU and of the second matrix (2 feed-forward widths). Two peaks
are compared: the backward of the loss, which holds logits, their logarithms and a gradient, and that of a block. The
allocator has holes that it does not use again: twice what a whole block keeps, whatever of it is cut or run again, for
what is alive for a moment is not, or 1.5 times where a step has one micro-batch, and the next finds memory as it was;
and 1.2 times the weights as they were built, whole under tp. All were measured, on 30 plans of models of 3 and 11
million parameters.
Resident memory is counted: pages of neighbours that a rank reads in place are its own too, and so are the rings through
which messages go.
Simplification: heads and rotations in float32.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.presets.counts import num_parameters
from meshwright.presets.host import HostProfile
from meshwright.simulation.host import num_parts, num_stages, rank_numel, stage_blocks
from meshwright.simulation.job import Layout, Workload, num_microbatches
from meshwright.simulation.layers import layer_numel
from meshwright.simulation.peak import PeakBytes, in_flight

_FLOAT = 4
# Two buckets of gradients are open at a time.
_BUCKET_BYTES = 25 << 20
# Of holes: parts of what a block keeps and of weights, less what a process that has trained a small block has already.
_OF_BLOCK, _OF_ONLY_BLOCK, _OF_WEIGHTS, _BEFORE_BYTES = 2.0, 1.5, 1.2, 8 << 20
# A ring of `comm/transports/shared_messages.py`.
RING_PIECES, RING_PIECE_BYTES = 32, 256 << 10


def host_peak(work: Workload, layout: Layout, host: HostProfile) -> PeakBytes:
    """Predict the resident memory of the fullest process."""
    numel, n = rank_numel(work, layout), layout.num_shards
    size = _FLOAT * numel
    weights = size / (n if layout.zero == 3 else 1)
    gradients = size / (n if layout.zero >= 2 else 1)
    pool = _open_buckets(work, layout, size) if layout.zero >= 2 and n > 1 else 0.0
    optimizer = 2 * size / (n if layout.zero else 1)
    activations, logits = _activations(work, layout)
    mapped = _mapped(layout, size) + _rings(work, layout)
    holes = _holes(work, layout, size)
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


def _holes(work: Workload, layout: Layout, size: float) -> float:
    """What the allocator holds and cannot use.

    Args:
        work: the model and its batch.
        layout: how it is carried out.
        size: bytes of the rank's weights.
    """
    tokens = layout.micro_batch * work.seq_len / layout.cp
    block = block_floats(work, replace(layout, tp=1)) + _exchanged_floats(work, layout)
    built = size if layout.pp > 1 else _FLOAT * num_parameters(work.model)
    times = _OF_BLOCK if num_microbatches(work, layout) > 1 else _OF_ONLY_BLOCK
    return max(0.0, times * _FLOAT * tokens * block + _OF_WEIGHTS * built - _BEFORE_BYTES)


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


def _rings(work: Workload, layout: Layout) -> float:
    """Rings of messages that the fullest process writes and reads: one to and one from each neighbour."""
    model, tokens = work.model, layout.micro_batch * work.seq_len / layout.cp
    stream = _FLOAT * tokens * model.dim / (layout.tp if layout.sequence_parallel else 1)
    keys = 2 * _FLOAT * tokens * model.num_kv_heads * model.head_dim / layout.tp
    num_bytes = 0.0
    if layout.pp > 1:
        num_bytes += 2 * min(2, layout.pp - 1) * RING_PIECES * min(RING_PIECE_BYTES, stream)
    if layout.cp > 1 and layout.cp_kind == "ring":
        num_bytes += 2 * RING_PIECES * min(RING_PIECE_BYTES, keys)
    return num_bytes


def _exchanged_floats(work: Workload, layout: Layout) -> float:
    """Of a token, while heads are exchanged for positions: queries, keys and values in pieces, packed, received, put
    together, and their sums."""
    if layout.cp == 1 or layout.cp_kind != "ulysses":
        return 0.0
    return 5.0 * (work.model.dim + 2 * work.model.num_kv_heads * work.model.head_dim)


def block_floats(work: Workload, layout: Layout) -> float:
    """What a block keeps for each token of a rank."""
    model, t = work.model, layout.tp
    kv = model.num_kv_heads * model.head_dim
    whole = t if layout.sequence_parallel else 1
    # What heads gave is kept before and after it is exchanged.
    twice = model.dim / t if layout.cp > 1 and layout.cp_kind == "ulysses" else 0.0
    if model.family in ("gpt", "bert"):
        cut = 2 * model.dim + 2 * kv + 2 * model.ffn_dim
        return twice + 4 * model.dim / whole + cut / t + model.num_heads / t + 4
    cut = 2 * model.dim + 2 * kv + 4 * model.ffn_dim
    return twice + 6 * model.dim / whole + cut / t + model.num_heads / t + 2


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
