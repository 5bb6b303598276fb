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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from meshwright.comm.ops import DataGroups, Group
from meshwright.layout.bucket import Piece
from meshwright.layout.policy import ShardingPolicy
from meshwright.layout.tensor_layout import CutRegion, TensorLayout
from meshwright.sharding.gatherer import GatheredUnit, Gatherer, Turn
from meshwright.sharding.gradients import Gradients
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
from meshwright.sharding.units import find_units, plan_units

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
        root = [
            m
            for u, memories in zip(self.units, self._unit_memories, strict=True)
            if u.is_root
            for m in memories
        ]
        self.gradients = Gradients(
            self._trained,
            policy,
            groups,
            pools=self._gradient_pools,
            root=root if policy.shards_parameters else None,
        )
        self._make_shards()
        self.compute_dtype = compute_dtype
        self._offloads = offload
        # Tensors that a rank with another part of the model counts and writes, and what the whole model has.
        self.counted_elsewhere: frozenset[str] = frozenset()
        self.whole: WholeModel | None = None
        self._gatherer = self._make_gatherer(model) if policy.shards_parameters else None

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
        gradients = self.gradients  # not the engine: modules would hold it in a cycle through C++
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
            finish_unit=lambda unit: gradients.reduce(unit.memories),
        )

    # The life of a step.

    def start_step(self) -> None:
        """Forget the last step's gradients."""
        self.gradients.start_step()

    def start_microbatch(self, *, last: bool) -> None:
        """Before a forward; `last` says that no further micro-batch follows in this step."""
        self.expect_gradients(last=last)
        self.start_forward()

    def expect_gradients(self, *, last: bool) -> None:
        """Before a backward, wherever its forward was; `last` says that none follows in this step."""
        self.gradients.expect(last=last)

    def start_forward(self, turn: Turn | None = None) -> None:
        """Before a forward, whenever its backward will be; `turn`: its stage and micro-batch in a pipeline."""
        if self._gatherer is not None:
            self._gatherer.start_forward(turn)

    def start_backward(self, turn: Turn | None = None) -> None:
        """Between forward and backward; `turn`: that of the forward."""
        self.gradients.in_backward = True
        if self._gatherer is not None:
            self._gatherer.start_backward(turn)

    def finish_microbatch(self) -> None:
        """After a backward: reduce what is incomplete, free what is gathered."""
        self.gradients.in_backward = False
        if self._gatherer is not None:
            self._gatherer.finish_backward()
        self.gradients.finish_microbatch()

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
        return torch.tensor(
            [float(self.gradients.is_used(name)) for name in self._names], dtype=torch.float64
        )

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


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum of squares of a 1-D tensor as float64 (0-dim), accurate for any length."""
    whole = x.numel() // NORM_ROW_NUMEL * NORM_ROW_NUMEL
    rows = torch.linalg.vector_norm(x[:whole].view(-1, NORM_ROW_NUMEL), dim=1).double()
    tail = torch.linalg.vector_norm(x[whole:].double())
    return rows.square().sum() + tail.square()
