"""Seconds of a training step on ranks of one host that was measured: parts that were timed, put together for a plan.

A rank computes its blocks and head, and its collectives are copies that it makes itself, so that all of them are
seconds of its processor. Ranks that outnumber cores take turns; a pipeline is run event by event on the cores that
each of its stages has.
Simplifications: ranks are equally busy but for their stages; a rank with several cores is as fast as one with all of
them at work; waiting costs nothing beside what somebody else computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.presets.counts import num_parameters
from meshwright.presets.host import HostProfile
from meshwright.schedule.action import COMPUTE, Schedule
from meshwright.schedule.catalogue import make_schedule
from meshwright.schedule.lower import lower
from meshwright.schedule.timing import Durations
from meshwright.simulation.host_keys import attend_of, block_of, head_of
from meshwright.simulation.host_network import network_seconds
from meshwright.simulation.job import Cluster, Layout, Workload, num_microbatches
from meshwright.simulation.machinery import Machinery, Wire
from meshwright.simulation.step import StepSeconds, layer_numel
from meshwright.simulation.timeline import simulate

_FLOAT = 4
# Several threads of a rank do not divide its work evenly.
_THREADS_RATE = 0.85


@dataclass(frozen=True)
class _Pass:
    """One micro-batch of a rank: a block's passes and what its ranks exchange for it, all in seconds."""

    forward: float
    inputs: float
    weights: float
    again: float
    head: tuple[float, float]
    tensor: float
    context: float
    ends: float

    @property
    def block(self) -> float:
        """A block with all that belongs to it."""
        return self.forward + self.inputs + self.weights + self.again + self.tensor + self.context


def host_step(work: Workload, layout: Layout, cluster: Cluster) -> StepSeconds:
    """Predict one step on hosts like the one that was measured; the layout's blocks must have been."""
    host = cluster.host
    assert host is not None, "a host that was measured"
    one = _one_pass(work, layout, host)
    m, crowd = num_microbatches(work, layout), crowd_of(cluster)
    layers = work.model.num_layers
    whole = layers * one.block + sum(one.head) + one.ends + host.microbatch_seconds
    numel = rank_numel(work, layout)
    blocks = layers / layout.pp
    weights, gradients = _exchange(layout, host, numel, m, blocks)
    kept = host.accumulate_seconds * numel * (m - 1) if layout.zero < 2 else 0.0
    update = host.update_seconds * numel / (layout.num_shards if layout.zero else 1)
    network = network_seconds(work, layout, cluster, numel)
    if layout.pp > 1:
        running, busiest, message = _pipeline(work, layout, cluster, one, network.wire)
    else:
        running, busiest, message = crowd * m * whole, m * whole, 0.0
    share = crowd * m * blocks
    tensor, context = share * one.tensor, share * one.context
    beside = tensor + context + message
    compute = max(0.0, min(running, crowd * busiest) - beside)
    taught = host.learned
    return StepSeconds(
        compute=taught.compute * (compute + crowd * kept),
        recompute=taught.compute * share * one.again,
        bubble=taught.waiting * max(0.0, running - compute - beside),
        tensor=taught.exchange * (tensor + network.tensor),
        context=taught.exchange * (context + network.context),
        pipeline=taught.exchange * message,
        weights=taught.exchange * (crowd * weights + network.weights),
        gradients=taught.exchange * (crowd * gradients + network.gradients),
        optimizer=taught.update * crowd * (update + host.step_seconds),
    )


def crowd_of(cluster: Cluster) -> float:
    """How many times longer a rank takes than alone on a core; less than 1 where it has several."""
    assert cluster.host is not None, "a host that was measured"
    ranks, cores = min(cluster.num_devices, cluster.devices_per_node), cluster.host.cores
    if ranks >= cores:
        return ranks / cores
    threads = cores // ranks
    return 1.0 if threads == 1 else 1 / (threads * _THREADS_RATE)


def rank_numel(work: Workload, layout: Layout) -> float:
    """Parameters of the fullest rank before any of `zero`'s cuts; what tp does not cut is small."""
    model = work.model
    if layout.pp == 1:
        return num_parameters(model) / layout.tp
    most = max(stage_blocks(work.model.num_layers, num_stages(layout)))
    ends = model.vocab_size * model.dim
    return (most * num_parts(layout) * layer_numel(work) + ends) / layout.tp


def num_parts(layout: Layout) -> int:
    """Stages of a rank."""
    if layout.schedule in ("zb-v", "dualpipe"):
        return 2
    return layout.chunks if layout.schedule == "interleaved" else 1


def num_stages(layout: Layout) -> int:
    """Of the whole pipeline; in both directions of dualpipe they are the same."""
    return layout.pp * (1 if layout.schedule == "dualpipe" else num_parts(layout))


def stage_blocks(num_layers: int, stages: int, head: float = 0.0) -> tuple[int, ...]:
    """Blocks of each stage so that the slowest is as fast as it can be; `head` in blocks, on the last.

    A stage may have none: that of the embedding, or of the head.
    """
    best: tuple[float, tuple[int, ...]] = (float("inf"), ())
    others = stages - 1
    for last in range(num_layers // stages, -1, -1) if others else ():
        rest = num_layers - last
        counts = tuple(rest // others + (1 if at < rest % others else 0) for at in range(others))
        slowest = max(max(counts), last + head)
        if slowest < best[0]:
            best = (slowest, (*counts, last))
    return best[1] or (num_layers,)


def _one_pass(work: Workload, layout: Layout, host: HostProfile) -> _Pass:
    micro = layout.micro_batch
    block = host.block(block_of(work, layout).key, micro)
    head = host.part(head_of(work, layout).key, micro)
    shape = attend_of(work, layout)
    attend = None if shape is None else host.part(shape.key, micro)
    forward, inputs = block.forward, block.inputs
    core = block.core
    if attend is not None:
        forward += attend.forward - block.core
        inputs += attend.backward - block.core_back
        core = attend.forward
    again = {"none": 0.0, "selective": core, "full": forward}.get(layout.recompute, forward / 2)
    tensor, ends = _tensor(work, layout, host)
    return _Pass(
        forward + host.layer_seconds / 2,
        inputs + host.layer_seconds / 2,
        block.weights,
        again,
        (head.forward, head.backward),
        tensor,
        _context(work, layout, host),
        ends,
    )


def _tensor(work: Workload, layout: Layout, host: HostProfile) -> tuple[float, float]:
    """Collectives of tp: of a block and micro-batch, and of embedding and head."""
    if layout.tp == 1:
        return 0.0, 0.0
    tokens = layout.micro_batch * work.seq_len // layout.cp
    stream = float(_FLOAT * tokens * work.model.dim)
    again = 2 if layout.recompute == "full" else 0
    if not layout.sequence_parallel:
        one = host.collective("all_reduce", layout.tp, stream)
        return (4 + again) * one, 2 * one
    gather = host.collective("all_gather", layout.tp, stream)
    reduce = host.collective("reduce_scatter", layout.tp, stream)
    return (4 + again) * (gather + reduce), gather + reduce


def _context(work: Workload, layout: Layout, host: HostProfile) -> float:
    """What cp sends for a block and micro-batch."""
    if layout.cp == 1:
        return 0.0
    model, n = work.model, layout.cp
    tokens = layout.micro_batch * work.seq_len
    keys = float(_FLOAT * tokens * 2 * max(1, model.num_kv_heads // layout.tp) * model.head_dim)
    forwards = 2 if layout.recompute in ("full", "selective") else 1
    if layout.cp_kind == "ring":
        return (forwards + 2) * (n - 1) * host.collective("message", 2, keys / n)
    if layout.cp_kind == "ulysses":
        queries = float(_FLOAT * tokens * model.dim / layout.tp / n)
        inner, outer = (host.collective("all_to_all", n, size) for size in (queries + keys / n, queries))
        return (forwards + 1) * (inner + outer)
    gather = host.collective("all_gather", n, keys)
    return (forwards + 1) * gather + host.collective("reduce_scatter", n, keys)


def _exchange(layout: Layout, host: HostProfile, numel: float, m: int, blocks: float) -> tuple[float, float]:
    """(every micro-batch of zero3, at the end of a step): seconds of one rank."""
    n = layout.num_shards
    copies = layout.dp * layout.cp // n
    if layout.dp * layout.cp == 1:
        return 0.0, 0.0
    size = _FLOAT * numel
    between = host.collective("shared all_reduce", copies, size / (n if layout.zero else 1))
    if layout.zero == 0:
        return 0.0, host.collective("shared all_reduce", layout.dp * layout.cp, size)
    reduce = host.collective("shared reduce_scatter", n, size)
    if layout.zero == 3:  # gathered weights are the shards themselves, in memory that the ranks share
        return m * (reduce + blocks * host.gather_seconds), between
    gather = host.collective("shared all_gather", n, size)
    return 0.0, (m if layout.zero == 2 else 1) * reduce + between + gather


# Pipelines.


def _pipeline(
    work: Workload, layout: Layout, cluster: Cluster, one: _Pass, wire: Wire
) -> tuple[float, float, float]:
    """(seconds of all micro-batches, of them what the busiest rank computes, what messages add to a rank)."""
    host = cluster.host
    assert host is not None, "a host that was measured"
    teams, all_cores = layout.num_devices // layout.pp, host.cores * max(1, cluster.num_nodes)
    cores = max(1, min(layout.pp, all_cores // teams))
    slow, m = _slow(layout, cluster), num_microbatches(work, layout)
    message = _message(work, layout, host)
    lowered = _lowered(layout.schedule, layout.pp, m, _chunks(layout))
    durations = _durations(work, layout, cluster, one)
    seconds = simulate(lowered, Machinery(durations, wire, cores=cores)).seconds
    per_rank = [
        sum(durations.of(action) for action in program if action.op in COMPUTE) / slow
        for program in lowered.programs
    ]
    beside = m * host.microbatch_seconds
    crowd = crowd_of(cluster)
    return seconds + crowd * beside, max(per_rank) + beside, crowd * 2 * m * num_parts(layout) * message


def host_pipeline(work: Workload, layout: Layout, cluster: Cluster) -> tuple[Schedule, Durations]:
    """The order of a plan's micro-batches, and seconds of its stages on a host that was measured."""
    host = cluster.host
    assert host is not None, "a host that was measured"
    chunks = _chunks(layout)
    schedule = make_schedule(
        layout.schedule, layout.pp, num_microbatches(work, layout), num_chunks=chunks if chunks > 1 else None
    )
    return schedule, _durations(work, layout, cluster, _one_pass(work, layout, host))


def _chunks(layout: Layout) -> int:
    return layout.chunks if layout.schedule == "interleaved" else 1


def _slow(layout: Layout, cluster: Cluster) -> float:
    """How many times longer a stage takes where its ranks outnumber the cores."""
    assert cluster.host is not None, "a host that was measured"
    return max(1.0, layout.num_devices / layout.pp / (cluster.host.cores * max(1, cluster.num_nodes)))


def _message(work: Workload, layout: Layout, host: HostProfile) -> float:
    """Seconds of a micro-batch's values from stage to stage."""
    tokens = layout.micro_batch * work.seq_len // layout.cp
    return host.collective("message", 2, _FLOAT * tokens * work.model.dim / layout.tp)


def _durations(work: Workload, layout: Layout, cluster: Cluster, one: _Pass) -> Durations:
    """Seconds of each stage's passes."""
    host = cluster.host
    assert host is not None, "a host that was measured"
    slow, stages, message = _slow(layout, cluster), num_stages(layout), _message(work, layout, host)
    counts = stage_blocks(work.model.num_layers, stages, sum(one.head) / one.block)
    splits = layout.zero < 2 and layout.schedule.startswith("zb")
    half = (one.tensor + one.context) / 2
    forward, inputs, weights = [], [], []
    for stage, count in enumerate(counts):
        borders = (stage > 0) + (stage < stages - 1)
        own = one.head if stage == stages - 1 else (0.0, 0.0)
        forward.append(slow * (count * (one.forward + half) + own[0] + borders * message / 2))
        back = count * (one.inputs + half + one.again) + own[1] + borders * message / 2
        back += 0.0 if splits else count * one.weights
        inputs.append(slow * back)
        weights.append(slow * count * one.weights if splits else 0.0)
    return Durations(tuple(forward), tuple(inputs), tuple(weights))


@lru_cache(maxsize=1000)
def _lowered(name: str, ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    return lower(make_schedule(name, ranks, num_microbatches, num_chunks=chunks if chunks > 1 else None))
