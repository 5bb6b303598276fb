"""The bucket engine: shards an unmodified model by a policy and moves its weights and gradients.

Life of a step, called by `training/step.py`:

    start_step
      start_microbatch(last=...)   zero3: gather the root and the first unit
        forward of the user's loss
      start_backward
        backward                   hooks take gradients; complete buckets are reduced, in one common order
      finish_microbatch            incomplete buckets are reduced too: a missing gradient hangs nobody
                                   after the last one every gradient shard holds the sum over ranks and
                                   micro-batches
    (norm, clip, optimizer on `shards`, in the parts of `updating`)
    finish_step                    masters are cast into weights; zero1, zero2: gather the updated weights

[Note: masters] Where the model computes in 16 bits, the optimizer updates float32 masters; gradients are summed, over
micro-batches and over ranks, in float32, and weights travel in 16 bits. With offload the masters, a copy of the summed
gradient and the optimizer's state are in host memory.

The engine sums gradients over ranks and micro-batches; what they are divided by is the training step's business. It
knows nothing of optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from meshwright.comm import ops
from meshwright.comm.ops import DataGroups, Group
from meshwright.errors import LoopError
from meshwright.layout.bucket import Piece, Unit
from meshwright.layout.grouping import Division, group_by_module, group_by_size
from meshwright.layout.policy import ShardingPolicy
from meshwright.layout.tensor_layout import CutRegion, TensorLayout
from meshwright.sharding.gatherer import GatheredUnit, Gatherer, Turn
from meshwright.sharding.host import HostCopies
from meshwright.sharding.memory import BucketMemory, Initialiser
from meshwright.sharding.placement import (
    check_devices,
    devices_of,
    make_pools,
    move_buffers,
    move_parameters,
    place_of,
    pooled_bytes,
)
from meshwright.sharding.units import (
    assign_units,
    find_units,
    parameter_specs,
)

# Reductions that stay in flight behind the newest backward work: more hides nothing (the next one waits for the
# wire) and each holds a buffer. `layout/accounting.py` counts these buffers.
REDUCTIONS_IN_FLIGHT = 1
# Rows of the norm: float32 sums over longer vectors lose digits (7e-4 relative at 16.8 M elements), so squares
# are summed in float32 over short rows and in float64 over rows.
NORM_ROW_NUMEL = 1 << 12


@dataclass(frozen=True)
class ShardParameter:
    """What the optimizer sees: one rank's piece of one logical parameter.

    Attributes:
        name: of the logical parameter.
        shape: of the logical parameter.
        piece: which flat elements this rank owns.
        parameter: view of this rank's memory (of the master, where there is one); its `.grad` is a view of the summed
            gradient. It has the logical shape where ranks hold whole parameters (ddp, one shard), else it is 1-D.
        gradient: that view.
        is_hidden: whether the logical parameter is a matrix of a repeated block.
    """

    name: str
    shape: tuple[int, ...]
    piece: Piece
    parameter: nn.Parameter
    gradient: Tensor
    is_hidden: bool = False


@dataclass(frozen=True)
class WholeModel:
    """The model of which an engine has some modules only.

    Attributes:
        parameters: name to shape, of a rank that has all modules.
        buffers: the same of persistent buffers.
        trained: names of trained parameters.
        aliases: further names of tied parameters to their first.
        dtypes: type of each entry of its state dict, in order, as masters have it.
    """

    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    trained: frozenset[str]
    aliases: Mapping[str, str]
    dtypes: Mapping[str, torch.dtype]


class ShardingEngine:
    """Shards `model` over `groups` by `policy`; the model is changed in place and its class is not.

    Args:
        model: any module; parameters may be on the meta device if `initialiser` can draw them.
        policy: a row of the table.
        groups: the data-parallel ranks; `engine.group` is all of them, `engine.owners` those that divide the update
            of one copy.
        device: where the memory lives.
        initialiser: values of meta parameters.
        compute_dtype: of forward and backward, where that is another than the model's parameters have now.
        offload: whether the optimizer's state and what it updates are in host memory.
        tensor_layout: which part of the whole model's parameters `model` has; None: all.
        apart: of parameters that ranks with another part of the model hold too, a word for these ranks.
    """

    def __init__(  # noqa: PLR0913 - what a plan may ask of it
        self,
        model: nn.Module,
        *,
        policy: ShardingPolicy,
        groups: DataGroups,
        device: torch.device,
        initialiser: Initialiser | None = None,
        compute_dtype: torch.dtype | None = None,
        offload: bool = False,
        tensor_layout: TensorLayout | None = None,
        apart: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.model = model
        self.tensor_layout = tensor_layout
        self.policy = policy
        self.groups = groups
        self.group: Group = groups.all
        self.device = device
        self.owners = groups.shard if policy.shards_optimizer else groups.all
        places = devices_of(model, device)
        check_devices(places, policy, offload=offload)
        first = groups.num_workers if groups.num_servers else 0
        self.units = plan_units(
            model,
            policy,
            self.owners.size,
            compute_dtype,
            places,
            first_owner=first,
            tensor_layout=tensor_layout,
            apart=apart,
        )
        parameters = dict(model.named_parameters())
        copies = HostCopies(device) if offload else None
        self._names = list(parameters)
        index = self.owners.index
        self._unit_memories = [
            [BucketMemory(bucket, parameters, policy, index, host_copies=copies) for bucket in unit.buckets]
            for unit in self.units
        ]
        self.memories = [memory for memories in self._unit_memories for memory in memories]
        with torch.no_grad():
            for memory in self.memories:
                memory.allocate(place_of(memory.bucket, device), initialiser, groups)
            bucketed = {parameter for memory in self.memories for parameter in memory.parameters}
            move_parameters(model, device, initialiser, compute_dtype, leave_out=bucketed)
            move_buffers(model, device)
        self._trained = [memory for memory in self.memories if memory.bucket.trainable]
        self._make_pools(device)
        self._make_shards()
        self.compute_dtype = compute_dtype
        self._offloads = offload
        self._used: set[str] = set()
        # Tensors that a rank with another part of the model counts and writes, and what the whole model has.
        self.counted_elsewhere: frozenset[str] = frozenset()
        self.whole: WholeModel | None = None
        self._last = True
        self._in_backward = False
        self._next_bucket = 0
        self._in_flight: list[BucketMemory] = []
        self._gatherer = self._make_gatherer(model) if policy.shards_parameters else None
        # Hooks of a tensor live in C++, where Python's collector sees no cycle: one that held the engine would keep
        # it, its model and the threads of its process groups for ever.
        engine = weakref.ref(self)
        for number, memory in enumerate(self._trained):
            for position, parameter in enumerate(memory.parameters):
                parameter.register_post_accumulate_grad_hook(
                    lambda _p, number=number, position=position: _take_for(engine, number, position)
                )

    def _make_pools(self, device: torch.device) -> None:
        """Memory of open gradients and of gathered weights."""
        by_unit = list(zip(self.units, self._unit_memories, strict=True))
        own_root = self.policy.shards_parameters
        summing = [(u, m) for u, memories in by_unit for m in memories if m.sums_in_shard]
        gathering = [(u, m) for u, memories in by_unit for m in memories if m.transient]
        reduced = partial(self.groups.allocate, device=device)
        self._gradient_pools = make_pools(
            summing, reduced, own_root=own_root, dtype_of=lambda m: m.master_dtype
        )
        # Flat shards are read where they are; whole ones travel from their owner's gathered weights.
        gathered = reduced if self.policy.ownership == "whole" else partial(torch.zeros, device=device)
        self._weight_pools = make_pools(gathering, gathered, own_root=own_root, dtype_of=lambda m: m.dtype)

    def _make_shards(self) -> None:
        self._shards_of: dict[BucketMemory, list[ShardParameter]] = {memory: [] for memory in self._trained}
        for memory in self._trained:
            specs = {spec.name: spec for spec in memory.bucket.parameters}
            for piece in memory.pieces():
                where = slice(piece.offset, piece.offset + piece.stop - piece.start)
                spec = specs[piece.name]
                shape = spec.shape if memory.holds_whole else (piece.stop - piece.start,)
                view = nn.Parameter(memory.master_shard[where].view(shape))
                gradient = memory.update_gradient[where].view(shape)
                view.grad = gradient
                self._shards_of[memory].append(
                    ShardParameter(piece.name, spec.shape, piece, view, gradient, spec.is_hidden)
                )
        self.shards = [shard for shards in self._shards_of.values() for shard in shards]

    def _make_gatherer(self, model: nn.Module) -> Gatherer:
        units = [
            GatheredUnit(unit.name, memories)
            for unit, memories in zip(self.units, self._unit_memories, strict=True)
        ]
        return Gatherer(
            units,
            find_units(model),
            self.groups.shard,
            pools=self._weight_pools,
            keep_last=self.policy.keep_last,
            finish_unit=self._finish_unit,
        )

    # The life of a step.

    def start_step(self) -> None:
        """Forget the last step's gradients."""
        self._used.clear()
        for memory in self._trained:
            memory.start_step()

    def start_microbatch(self, *, last: bool) -> None:
        """Before a forward; `last` says that no further micro-batch follows in this step."""
        self.expect_gradients(last=last)
        self.start_forward()

    def expect_gradients(self, *, last: bool) -> None:
        """Before a backward, wherever its forward was; `last` says that none follows in this step."""
        self._last = last
        self._next_bucket = 0
        for memory in self._trained:
            memory.start_microbatch()

    def start_forward(self, turn: Turn | None = None) -> None:
        """Before a forward, whenever its backward will be; `turn`: its stage and micro-batch in a pipeline."""
        if self._gatherer is not None:
            self._gatherer.start_forward(turn)

    def start_backward(self, turn: Turn | None = None) -> None:
        """Between forward and backward; `turn`: that of the forward."""
        self._in_backward = True
        if self._gatherer is not None:
            self._gatherer.start_backward(turn)

    def finish_microbatch(self) -> None:
        """After a backward: reduce what is incomplete, free what is gathered."""
        self._in_backward = False
        if self._gatherer is not None:
            self._gatherer.finish_backward()
            self._finish_root()
        elif self._reduces_now:
            for position in range(self._next_bucket, len(self._trained)):
                self._reduce(self._trained[position])
        self._drain(0)
        if self._last:
            self._finish_sums()

    def _finish_sums(self) -> None:
        """Every gradient shard holds the sum of the whole step, over all copies of the model."""
        for memory in self._trained:
            memory.finish_step_sum()
            if self.policy.shards_optimizer:  # not yet begun where the last micro-batch left the bucket out
                memory.start_copies_sum(self.groups.replicate)
        for memory in self._trained:
            if memory.copies_sum is not None:
                memory.copies_sum.wait()
            if _is_partial(memory) and self.groups.tensor is not None:
                total = ops.all_reduce(memory.gradient_shard, self.groups.tensor, cause="partial gradients")
                total.wait()
            memory.start_fetch()

    def finish_step(self) -> None:
        """After the optimizer: updated masters go into weights, and these to other ranks where the policy says so."""
        for memory in self._trained:
            memory.publish()
        if self.policy.after_step != "all_gather":
            return
        handles = [memory.start_update(self.groups.shard) for memory in self._trained]
        for handle in [handle for started in handles for handle in started]:
            handle.wait()

    def publish_masters(self) -> None:
        """Make every weight what `shards` hold now, e.g. after a load into them."""
        for memory in self._trained:
            memory.is_published = False
        self.finish_step()

    def await_gradients(self) -> None:
        """Return when every gradient is where the optimizer reads it, for an update in one piece."""
        for memory in self._trained:
            memory.finish_fetch()

    def updating(self) -> Iterator[list[ShardParameter]]:
        """The shards, in the parts in which an optimizer should update them; each with its gradient in place.

        With offload a part is a bucket: while the host updates one, weights of the one before go up.
        """
        if not self._offloads:
            yield self.shards
            return
        for memory, shards in self._shards_of.items():
            memory.finish_fetch()
            yield shards
            memory.publish()

    def parts_of_update(self) -> list[list[ShardParameter]]:
        """The parts of `updating`."""
        return list(self._shards_of.values()) if self._offloads else [list(self.shards)]

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Run forwards without gradients inside; weights are gathered and freed as in training."""
        with torch.no_grad():
            if self._gatherer is not None:
                self._gatherer.start_forward(evaluation=True)
            try:
                yield
            finally:
                if self._gatherer is not None:
                    self._gatherer.finish_evaluation()

    # What the training step and checkpoints read.

    @property
    def region(self) -> CutRegion | None:
        """What is cut over tp while the model runs; None: nothing ever is."""
        return None if self.tensor_layout is None else self.tensor_layout.region

    @property
    def replica(self) -> tuple[int, int]:
        """This rank's number among the ranks that hold the same shards, and how many they are."""
        alike = self.groups.replicate if self.policy.shards_optimizer else self.group
        return alike.index, alike.size

    @property
    def parameter_names(self) -> list[str]:
        """Names of all distinct parameters, in order of registration; the same on every rank."""
        return self._names

    def used_mask(self) -> Tensor:
        """float64 vector over `parameter_names`: 1 where this rank got a gradient in this step."""
        return torch.tensor([float(name in self._used) for name in self._names], dtype=torch.float64)

    def norm_squared(self) -> Tensor:
        """Sum of squares (float64, 0-dim) over the gradient elements that this rank counts.

        Every logical element is counted on exactly one rank, also where gradients are replicated (ddp, tp).
        """
        if self.tensor_layout is not None or self.counted_elsewhere:
            return self.norm_squared_of(self.shards)
        total = torch.zeros((), dtype=torch.float64)
        holders = self.groups.replicate if self.policy.shards_optimizer else self.group
        for memory in self._trained:
            held = memory.gradient_shard
            first, last = (held.numel() * (holders.index + step) // holders.size for step in (0, 1))
            total += sum_of_squares(held[first:last]).cpu()
        return total

    def norm_squared_of(self, shards: Sequence[ShardParameter]) -> Tensor:
        """As `norm_squared`, over these pieces alone; the ranks that hold the same ones share them out."""
        total = torch.zeros((), dtype=torch.float64)
        index, copies = self.replica
        for shard in shards:
            if self.tensor_layout is not None and not self.tensor_layout.counts(shard.name):
                continue
            if shard.name in self.counted_elsewhere:
                continue
            flat = shard.gradient.reshape(-1)
            bounds = [flat.numel() * i // copies for i in (index, index + 1)]
            total += sum_of_squares(flat[slice(*bounds)]).cpu()
        return total

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients that the optimizer reads."""
        if factor == 1.0:
            return
        for memory in self._trained:
            memory.finish_fetch()
            memory.update_gradient.mul_(factor)

    @property
    def gatherer(self) -> Gatherer | None:
        """zero3: what gathers weights around their use."""
        return self._gatherer

    @property
    def gathers_in_place(self) -> bool:
        """zero3: whether ranks share memory, so that gathered weights are the shards themselves."""
        return any(memory.common_weights is not None for memory in self.memories)

    @property
    def gathered_units(self) -> list[str]:
        """zero3: names of the units whose weights are gathered or on their way now."""
        return self._gatherer.gathered if self._gatherer is not None else []

    def storage_bytes(self) -> dict[str, int]:
        """Bytes held by the engine now, counted from the storages themselves.

        Keys: `weights` (full flat weights, gathered ones included), `weight_shards`, `masters` (float32 copies on the
        device), `gradients` (full flat gradients that stay), `gradient_shards`, `pool` (open gradient buffers), `host`
        (offloaded masters and gradients), `communication` (receive buffers).
        """
        keys = ("weights", "weight_shards", "masters", "gradients", "gradient_shards", "pool", "host")
        result = dict.fromkeys((*keys, "communication"), 0)
        for memory in self.memories:
            if memory.host is not None:
                result["host"] += memory.host.nbytes
            elif memory.has_own_master:
                result["masters"] += memory.master_shard.untyped_storage().nbytes()
            if memory.transient:
                result["weight_shards"] += memory.weight_shard.nbytes
            elif memory.weights is not None:
                result["weights"] += memory.weights.untyped_storage().nbytes()
            if memory.sums_in_shard:
                result["gradient_shards"] += memory.gradient_shard.untyped_storage().nbytes()
            elif memory.gradients is not None:
                result["gradients"] += memory.gradients.untyped_storage().nbytes()
        result["weights"] += pooled_bytes(self._weight_pools)
        result["pool"] = pooled_bytes(self._gradient_pools)
        distinct = {id(group): group for group in (self.group, self.groups.shard, self.groups.replicate)}
        for group in distinct.values():
            if group.transport is not None:
                result["communication"] += group.transport.scratch_bytes
        return result

    # Gradients.

    @property
    def trained_memories(self) -> list[BucketMemory]:
        """The buckets that get gradients, in the order of their reductions."""
        return self._trained

    def is_used(self, name: str) -> bool:
        """Whether a parameter got a gradient on this rank in this step."""
        return name in self._used

    def mark_used(self, name: str) -> None:
        """A parameter got a gradient on another rank that holds it."""
        self._used.add(name)

    def adder(self, parameter: nn.Parameter) -> Callable[[Tensor, Tensor], bool] | None:
        """For a trained parameter: a function that adds the product of two matrices to its gradient, past autograd.

        Hooks of the parameter do not see it. The gradient is complete when autograd has come to the parameter with
        nothing, or at the end of the backward. The function returns False, and does nothing, outside of backward. None
        where the product has another dtype than the sum.
        """
        for memory in self._trained:
            for position, candidate in enumerate(memory.parameters):
                if candidate is parameter and not memory.bucket.has_master:
                    return partial(self._add_product, memory, position)
        return None

    def _add_product(self, memory: BucketMemory, position: int, left: Tensor, right: Tensor) -> bool:
        if not self._in_backward:  # e.g. torch.autograd.grad inside the loss: its result is the user's
            return False
        self._admit(memory, position)
        memory.add_product(position, left, right)
        return True

    def lender(self, parameter: nn.Parameter) -> Callable[[], Tensor | None] | None:
        """For a trained parameter: a function that lends the memory where its gradient belongs, in backward.

        It returns None where the gradient must not be written in place: a second use in the same micro-batch, or a
        sum of earlier ones already there.
        """
        for memory in self._trained:
            if memory.bucket.has_master:  # no product of 16 bits writes float32 (docs/decisions/013)
                continue
            for position, candidate in enumerate(memory.parameters):
                if candidate is parameter:
                    return partial(self._lend, memory, position)
        return None

    def _lend(self, memory: BucketMemory, position: int) -> Tensor | None:
        if not self._in_backward:  # e.g. torch.autograd.grad inside the loss: its result is the user's
            return None
        if memory.gradients is None:
            memory.open(self._gradient_pools[memory])
        return memory.lend(position)

    @property
    def _reduces_now(self) -> bool:
        return self.policy.shards_gradients or self._last

    def _take(self, memory: BucketMemory, position: int) -> None:
        if memory.parameters[position].grad is not None:
            self._admit(memory, position)
            memory.take_gradient(position)
        elif not self._in_backward:
            return
        memory.missing.discard(position)  # else it was added past autograd, or there is none
        if not memory.missing and self._gatherer is None and self._reduces_now:
            self._reduce_in_order()

    def _admit(self, memory: BucketMemory, position: int) -> None:
        name = memory.bucket.parameters[position].name
        if not self._in_backward:
            raise LoopError(
                "E701",
                f"parameter {name!r} got a gradient outside of a step, where nothing sums it over the ranks: call "
                f"backward() inside `with model.accumulate():`",
            )
        if memory.reduced:
            raise RuntimeError(
                f"parameter {name!r} got a gradient after {memory.bucket.name} was reduced: it is used in several "
                f"backward passes of one micro-batch. Use checkpoint(..., use_reentrant=False)."
            )
        if memory.gradients is None:
            memory.open(self._gradient_pools[memory])
        self._used.add(name)

    def _reduce_in_order(self) -> None:
        """Start reductions of complete buckets, never one before its predecessors: every rank the same order."""
        while self._next_bucket < len(self._trained) and not self._trained[self._next_bucket].missing:
            self._reduce(self._trained[self._next_bucket])
            self._next_bucket += 1

    def _finish_unit(self, unit: GatheredUnit) -> None:
        for memory in unit.memories:
            if memory.bucket.trainable:
                self._reduce(memory)

    def _finish_root(self) -> None:
        for unit, memories in zip(self.units, self._unit_memories, strict=True):
            if unit.is_root:
                for memory in memories:
                    if memory.bucket.trainable:
                        self._reduce(memory)

    def _reduce(self, memory: BucketMemory) -> None:
        if memory.sums_in_shard and memory.gradients is None:
            memory.open(
                self._gradient_pools[memory]
            )  # no parameter of it got a gradient here; a peer may have some
        memory.start_reduction(self.groups)
        self._in_flight.append(memory)
        if self.policy.shards_optimizer:
            self._drain(REDUCTIONS_IN_FLIGHT)

    def _drain(self, keep: int) -> None:
        while len(self._in_flight) > keep:
            memory = self._in_flight.pop(0)
            memory.finish_reduction()
            if memory.sums_in_shard:
                memory.close(self._gradient_pools[memory])
            if self._last and self.policy.shards_optimizer and self.groups.replicate.size > 1:
                memory.start_copies_sum(self.groups.replicate)  # behind the rest of the backward
            elif self._last and not _is_partial(memory):
                memory.start_fetch()


def _is_partial(memory: BucketMemory) -> bool:
    """Whether the ranks of a copy of the model have each a part of the sum."""
    return memory.bucket.parameters[0].is_partial


def _take_for(reference: weakref.ref[ShardingEngine], number: int, position: int) -> None:
    """The hook of parameter `position` of trained bucket `number`: its gradient is complete."""
    engine = reference()
    if engine is not None:
        engine._take(engine._trained[number], position)


def plan_units(  # noqa: PLR0913 - whatever decides how buckets are cut
    model: nn.Module,
    policy: ShardingPolicy,
    num_shards: int,
    compute_dtype: torch.dtype | None = None,
    places: Mapping[str, torch.device] | None = None,
    *,
    first_owner: int = 0,
    tensor_layout: TensorLayout | None = None,
    apart: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Unit, ...]:
    """Group the model's parameters into units and buckets as `policy` wants them; see `parameter_specs`, `Division`.

    What is partial is small, and lies in the root: one sum over the ranks of a copy a step is for all of it.
    """
    partial_names = () if tensor_layout is None else tensor_layout.partial
    specs = parameter_specs(model, compute_dtype, places, partial=partial_names, apart=apart)
    if tensor_layout is not None:
        specs = [replace(spec, even_numel=tensor_layout.even_numel(spec.name, spec.shape)) for spec in specs]
    division = Division(num_shards, policy.alignment_numel, policy.ownership, first_owner)
    if policy.shards_parameters:
        unit_of = assign_units(model, find_units(model)) | dict.fromkeys(partial_names, "")
        return group_by_module(specs, unit_of, division)
    return group_by_size(specs, division, bucket_bytes=policy.bucket_bytes)


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum of squares of a 1-D tensor as float64 (0-dim), accurate for any length."""
    whole = x.numel() // NORM_ROW_NUMEL * NORM_ROW_NUMEL
    rows = torch.linalg.vector_norm(x[:whole].view(-1, NORM_ROW_NUMEL), dim=1).double()
    tail = torch.linalg.vector_norm(x[whole:].double())
    return rows.square().sum() + tail.square()
