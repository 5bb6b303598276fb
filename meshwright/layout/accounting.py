"""What a policy costs: collectives, bytes on the wire and bytes of memory, as formulas over buckets.

The engine is tested against these numbers, to the call and to the byte; a planner can read them before anything
runs. With N bytes of padded parameters over P ranks and A micro-batches, per rank and step:

| policy | wire bytes | weights + gradients + optimizer (AdamW, one element type) |
|---|---|---|
| ddp, zero1 | 2(P-1)/P·N | 4N; 2N + 2N/P |
| zero2 | (A+1)(P-1)/P·N | N + 3N/P, and two open buckets |
| zero3, U units | A·((2U-1 gathers) + U reduce-scatters) | 4N/P, and gathered units |

With whole ownership the bytes are the means over ranks: an owner receives what others send. With parameter servers
see `server_wire_bytes`. Over R copies of P ranks
each (hsdp) every rank sends another 2(R-1)/R·N/P once a step.

In a plan of 16 bits weights have 2 bytes an element, on the wire too; gradients, sums of them on the wire, optimizer
state and masters (one for each element that a rank updates) have 4. With offload the masters, and a copy of the
gradients that the optimizer reads, are in host memory.

Source: ZeRO (arXiv 1910.02054), sections 5 and 7.
Simplification: parameters of no bucket (not trained and not sharded) and activations are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from meshwright.layout.bucket import Bucket, Unit
from meshwright.layout.policy import ShardingPolicy

# Tensors of optimizer state as large as the parameter, and bytes of the step count beside them.
OPTIMIZER_SLOTS = {"adamw": (2, 4), "adam": (2, 4), "sgd": (0, 0), "sgd momentum": (1, 0), "muon": (1, 0)}


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes one rank holds.

    Attributes:
        weights: full flat weights; with zero3 the buffers of gathered units.
        weight_shards: shards of their own (zero3).
        masters: float32 copies of what this rank updates.
        gradients: full flat gradients that stay.
        gradient_shards: shards of their own (zero2, zero3).
        pool: open gradient buffers.
        host: masters and copies of gradients in host memory.
    """

    weights: int
    weight_shards: int
    masters: int
    gradients: int
    gradient_shards: int
    pool: int
    host: int = 0

    @property
    def total(self) -> int:
        """Sum of what the device holds."""
        weights = self.weights + self.weight_shards + self.masters
        return weights + self.gradients + self.gradient_shards + self.pool


def _nbytes(buckets: Sequence[Bucket]) -> int:
    return sum(bucket.nbytes for bucket in buckets)


def _shard_bytes(buckets: Sequence[Bucket], index: int) -> int:
    return sum(bucket.shard_numel(index) * bucket.itemsize for bucket in buckets)


def _gradient_bytes(buckets: Sequence[Bucket]) -> int:
    return sum(bucket.numel * bucket.master_itemsize for bucket in buckets)


def _master_bytes(policy: ShardingPolicy, buckets: Sequence[Bucket], index: int) -> int:
    """What rank `index` updates, in the element type of masters."""
    if not policy.shards_optimizer:
        return _gradient_bytes(buckets)
    return sum(bucket.shard_numel(index) * bucket.master_itemsize for bucket in buckets)


def _all(units: Sequence[Unit]) -> list[Bucket]:
    return [bucket for unit in units for bucket in unit.buckets]


def _trained(units: Sequence[Unit]) -> list[Bucket]:
    return [bucket for bucket in _all(units) if bucket.trainable]


def kept_unit(policy: ShardingPolicy, units: Sequence[Unit]) -> Unit | None:
    """The unit that stays gathered from forward to backward: the root where there is one, else the last block."""
    if not (policy.shards_parameters and policy.keep_last and units):
        return None
    return units[0] if units[0].is_root else units[-1]


def declared_calls(policy: ShardingPolicy, units: Sequence[Unit], *, num_microbatches: int) -> Counter[str]:
    """Logical collectives of one training step on each rank, by operation, without the one small reduction.

    Those among the ranks of one copy; `copies_calls` has those between copies. For models that use every unit once,
    in order.
    """
    calls: Counter[str] = Counter()
    buckets = _trained(units)
    if not buckets or buckets[0].num_shards == 1:
        return calls
    reduce, gather = shard_calls(policy)
    if policy.last_microbatch is not None:
        last = policy.last_microbatch
        calls[last if last == "all_reduce" else reduce] += num_calls(policy, buckets)
    if policy.gradient_ready == "reduce_scatter":
        calls[reduce] += num_calls(policy, buckets) * num_microbatches
    if policy.after_step is not None:
        calls[gather] += num_calls(policy, buckets)
    if policy.before_use is not None:
        kept = kept_unit(policy, units)
        gathers = 2 * num_calls(policy, _all(units)) - (num_calls(policy, kept.buckets) if kept else 0)
        calls[gather] += gathers * num_microbatches
    return calls


def shard_calls(policy: ShardingPolicy) -> tuple[str, str]:
    """Names of the operations that bring gradients to their owners and weights from them."""
    return ("reduce", "broadcast") if policy.ownership == "whole" else ("reduce_scatter", "all_gather")


def num_calls(policy: ShardingPolicy, buckets: Sequence[Bucket]) -> int:
    """One a bucket, with whole ownership one for each of its owners."""
    return sum(len(bucket.parts()) for bucket in buckets) if policy.ownership == "whole" else len(buckets)


def copies_calls(units: Sequence[Unit], *, num_copies: int) -> Counter[str]:
    """Logical collectives of one step between the copies of the model, where a sharding policy has several."""
    return Counter({"all_reduce": len(_trained(units))} if num_copies > 1 and _trained(units) else {})


def copies_wire_bytes(units: Sequence[Unit], *, num_copies: int, index: int = 0) -> int:
    """Bytes that rank `index` of each copy sends in one step to other copies."""
    nbytes = sum(bucket.shard_numel(index) * bucket.master_itemsize for bucket in _trained(units))
    return 2 * nbytes * (num_copies - 1) // num_copies


def declared_wire_bytes(policy: ShardingPolicy, units: Sequence[Unit], *, num_microbatches: int) -> int:
    """Bytes that each rank sends in one step (as many come in), without the one small reduction.

    Among the ranks of one copy, see `copies_wire_bytes`; with whole ownership the mean over them.
    """
    buckets = _trained(units)
    if not buckets or buckets[0].num_shards == 1:
        return 0
    shards = buckets[0].num_shards
    gradients, moved = _gradient_bytes(buckets), 0
    if policy.last_microbatch is not None:
        moved += gradients * (2 if policy.last_microbatch == "all_reduce" else 1)
    if policy.gradient_ready == "reduce_scatter":
        moved += gradients * num_microbatches
    if policy.after_step is not None:
        moved += _nbytes(buckets)
    if policy.before_use is not None:
        kept = kept_unit(policy, units)
        moved += num_microbatches * (2 * _nbytes(_all(units)) - (_nbytes(kept.buckets) if kept else 0))
    return moved * (shards - 1) // shards


def server_wire_bytes(units: Sequence[Unit], *, num_workers: int, index: int) -> tuple[int, int]:
    """Bytes that rank `index` (sends, receives) in one step with parameter servers, without the one small reduction.

    A worker pushes all gradients and pulls all weights; a server does this with its own part, once for each worker.
    """
    buckets = _trained(units)
    gradients, weights = _gradient_bytes(buckets), _nbytes(buckets)
    if index < num_workers:
        return gradients, weights
    part = sum(bucket.shard_numel(index) * bucket.master_itemsize for bucket in buckets)
    return num_workers * _shard_bytes(buckets, index), num_workers * part


def memory_bytes(
    policy: ShardingPolicy,
    units: Sequence[Unit],
    *,
    index: int = 0,
    offload: bool = False,
    gathers_in_place: bool = False,
    gathered_at_once: int = 2,
) -> MemoryBytes:
    """Bytes of weights and gradients that rank `index` holds from its first backward on, at every moment of a step.

    Ranks differ with whole ownership only. Buffers of gathered weights and open gradients are kept for reuse, so
    nothing grows or shrinks inside a step. For models that use every unit once, in order, and whose gradients come in
    reverse order. `offload`: whether masters and optimizer state are in host memory. `gathers_in_place`: whether ranks
    share memory, so that gathered weights are the shards themselves. `gathered_at_once`: blocks whose weights are held
    together; one more than 2 where blocks run again while another waits for its backward.
    """
    buckets, trained = _all(units), _trained(units)
    shards = buckets[0].num_shards if buckets else 1
    transient = policy.shards_parameters and shards > 1
    sums_in_shard = policy.shards_gradients and shards > 1
    gathered = (
        0 if gathers_in_place else _pool_bytes(policy, units, trained_only=False, most=gathered_at_once)
    )
    return MemoryBytes(
        weights=gathered if transient else _nbytes(buckets),
        weight_shards=_shard_bytes(buckets, index) if transient else 0,
        masters=0 if offload else _master_bytes(policy, [b for b in trained if b.has_master], index),
        gradients=0 if sums_in_shard else _gradient_bytes(trained),
        gradient_shards=_master_bytes(policy, trained, index) if sums_in_shard else 0,
        pool=_pool_bytes(policy, units, trained_only=True) if sums_in_shard else 0,
        host=2 * _master_bytes(policy, trained, index) if offload else 0,
    )


def _pool_bytes(policy: ShardingPolicy, units: Sequence[Unit], *, trained_only: bool, most: int = 2) -> int:
    """`most` buffers of the largest block of each kind, and for zero3 one of each root bucket's own size.

    Two: of gradients, one fills while one is reduced; of weights, one is used while the next is gathered.
    """
    total, shared = 0, dict[tuple[object, ...], list[int]]()
    for unit in units:
        for bucket in unit.buckets:
            if trained_only and not bucket.trainable:
                continue
            # Gradients of 16-bit and of float32 buckets share a pool: both are float32.
            kind = bucket.parameters[0].gradient_kind if trained_only else bucket.parameters[0].kind
            nbytes = bucket.numel * (bucket.master_itemsize if trained_only else bucket.itemsize)
            if unit.is_root and policy.shards_parameters:
                total += nbytes
            else:
                shared.setdefault(kind, []).append(nbytes)
    return total + sum(max(sizes) * min(most, len(sizes)) for sizes in shared.values())


def owner_imbalance(units: Sequence[Unit], *, first_owner: int = 0) -> float:
    """Bytes of parameters of the rank that owns most, over the mean of all ranks from `first_owner` on."""
    buckets = _all(units)
    owners = range(first_owner, buckets[0].num_shards if buckets else first_owner)
    held = [
        sum((p.stop - p.start) * bucket.itemsize for bucket in buckets for p in bucket.owned(owner))
        for owner in owners
    ]
    return max(held) * len(held) / sum(held) if any(held) else 1.0


def optimizer_bytes(
    policy: ShardingPolicy,
    units: Sequence[Unit],
    *,
    optimizer: str,
    index: int = 0,
    used: Collection[str] | None = None,
) -> int:
    """Bytes of optimizer state on data-parallel rank `index`, once `used` parameters (None: all) have been updated."""
    total = 0
    for bucket in _trained(units):
        owners = bucket.num_shards if policy.shards_optimizer else 1
        hidden = {parameter.name for parameter in bucket.parameters if parameter.is_hidden}
        for piece in bucket.owned(index if owners > 1 else 0, owners):
            if used is not None and piece.name not in used:
                continue
            by_adamw = optimizer == "muon" and piece.name not in hidden
            slots, step_bytes = OPTIMIZER_SLOTS["adamw" if by_adamw else optimizer]
            total += (piece.stop - piece.start) * bucket.master_itemsize * slots + step_bytes
    return total
