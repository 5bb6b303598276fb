"""One bucket on this rank: flat weights, flat gradients, this rank's shard of both, and what moves between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.comm import ops
from meshwright.comm.ops import DataGroups, Group, Handle
from meshwright.layout.bucket import Bucket, ParameterSpec, Piece
from meshwright.layout.policy import ShardingPolicy
from meshwright.sharding.host import HostCopies, HostShard

# (name, start, stop, dtype) -> values of the flat elements [start, stop) of a parameter built on the meta device
Initialiser = Callable[[str, int, int, torch.dtype], Tensor]
# numel -> zeros (1-D)
Allocator = Callable[[int], Tensor]


class BufferPool:
    """Flat buffers that live for a part of a step, kept for reuse: fresh memory costs page faults every step.

    In a model that uses its units in order two buffers alternate; whatever needs more at once gets a fresh one. A
    buffer returns here only when nobody reads or writes it any more.
    """

    def __init__(self, numel: int, allocate: Allocator) -> None:
        self.numel = numel
        self._allocate = allocate
        self._free: list[Tensor] = []
        self.buffers: list[Tensor] = []

    def take(self) -> Tensor:
        """A buffer of `numel` elements with unspecified values."""
        if not self._free:
            buffer = self._allocate(self.numel)
            self.buffers.append(buffer)
            return buffer
        return self._free.pop()

    def give(self, buffer: Tensor) -> None:
        """Return a buffer."""
        self._free.append(buffer)


class BucketMemory:
    """The tensors of one bucket on this rank.

    Attributes:
        weights: flat full weights; parameters are views of it. Where parameters are sharded, None while released:
            parameters then keep their shapes without memory, so that a use is an error, never a wrong number.
        weight_shard: this rank's part of the weights: a slice of `weights` or `common_weights`, or memory of its own.
        common_weights: where weights are sharded over ranks that share memory: the whole, of which each rank writes its
            part only, between the step's reduction and the next gather. Gathering it copies nothing.
        master_shard: what the optimizer updates: `weight_shard` itself; or a float32 copy of it where the model
            computes in 16 bits, in host memory where it is offloaded (all three exist once `allocate` has run).
        gradients: flat full gradients, or None while not open.
        gradient_shard: this rank's part of the summed gradient (trained buckets only); a slice of `gradients`, or
            memory of its own; in the type of the masters.
        missing: positions of parameters whose gradient has not come in this micro-batch.
        lent: positions whose view was lent in this micro-batch.
        written: positions whose values in `gradients` are of this step (an open buffer: of this micro-batch).
        reduced: whether the reduction of this micro-batch has been issued.
        sums_in_shard: whether `gradients` is only open during a backward and the sum lives in the shard.
        shard_holds_sum: whether the shard has been written in this step.
        reductions: the reduction of this micro-batch while it is in flight.
        copies_sum: the step's sum of the gradient shard over copies of the model while it is in flight.
        is_published: whether the weights are what the masters hold since this step's update.
        is_shared: whether ranks with another part of the model hold the bucket too.
        awaits_sum: whether their gradients of this step are still to be added.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: dict[str, nn.Parameter],
        policy: ShardingPolicy,
        index: int,
        *,
        host_copies: HostCopies | None = None,
    ) -> None:
        self.bucket = bucket
        self.policy = policy
        self.index = index
        self.dtype: torch.dtype = getattr(torch, bucket.parameters[0].dtype)
        self.master_dtype = torch.float32 if bucket.has_master else self.dtype
        self.host_copies = host_copies if bucket.trainable else None
        self.host: HostShard | None = None
        self.parameters = [parameters[spec.name] for spec in bucket.parameters]
        self.owner_count = bucket.num_shards if policy.shards_optimizer else 1
        self.owner_index = index if policy.shards_optimizer else 0
        self.transient = policy.shards_parameters and bucket.num_shards > 1
        self.weights: Tensor | None = None
        self.common_weights: Tensor | None = None
        self.gradients: Tensor | None = None
        self.gradient_views: list[Tensor] = []
        self.reductions: list[Handle] = []
        self.copies_sum: Handle | None = None
        self.missing: set[int] = set()
        self.written: set[int] = set()
        self.lent: set[int] = set()
        self.reduced = False
        self.sums_in_shard = False
        self.shard_holds_sum = False
        self.is_published = False
        self.is_shared = False
        self.awaits_sum = False

    @property
    def shard_slice(self) -> slice:
        """Where this rank's shard lies in the flat buffer."""
        return (
            slice(0, self.bucket.numel)
            if self.owner_count == 1
            else slice(*self.bucket.spans[self.owner_index])
        )

    @property
    def holds_whole(self) -> bool:
        """Whether ranks own whole parameters, never a part of one."""
        return self.owner_count == 1 or self.policy.ownership == "whole"

    @property
    def has_own_master(self) -> bool:
        """Whether the optimizer updates other memory than the weights."""
        return self.bucket.has_master or self.host_copies is not None

    def pieces(self) -> list[Piece]:
        """The parts of parameters that this rank updates."""
        return self.bucket.owned(self.owner_index, self.owner_count)

    def allocate(self, device: torch.device, initialiser: Initialiser | None, groups: DataGroups) -> None:
        """Move the parameters' values into flat memory and make the parameters views of it.

        What collectives of `groups` read or write is allocated by them.
        """
        travels = self.bucket.trainable and self.policy.after_step == "all_gather"
        allocate = partial(groups.allocate if travels else torch.zeros, dtype=self.dtype, device=device)
        flat = allocate(self.bucket.numel)
        self._allocate_masters(device)
        views = self._views(flat)
        for parameter, spec in zip(self.parameters, self.bucket.parameters, strict=True):
            if not parameter.is_meta:
                self._put(flat, spec, 0, parameter.detach().reshape(-1))
            else:
                assert initialiser is not None, f"parameter {spec.name} is on the meta device, without values"
                self._fill(flat, spec, initialiser)
        self._bound: dict[int, list[Tensor]] = {}
        if self.transient:
            self.common_weights = groups.allocate_common(flat.numel(), dtype=self.dtype, device=device)
            if self.common_weights is not None:
                self.weight_shard = self.common_weights[self.shard_slice]
            else:
                shard_numel = flat[self.shard_slice].numel()
                self.weight_shard = groups.allocate(shard_numel, dtype=self.dtype, device=device)
            self.weight_shard.copy_(flat[self.shard_slice])
            flat.untyped_storage().resize_(0)
            self._without_memory = views
        else:
            self.weights, self.weight_shard = flat, flat[self.shard_slice]
        if not self.has_own_master:
            self.master_shard = self.weight_shard
        for view, parameter in zip(views, self.parameters, strict=True):
            give_memory(parameter, view)
        if self.bucket.trainable:
            self._allocate_gradients(partial(groups.allocate, dtype=self.master_dtype, device=device))

    def _allocate_masters(self, device: torch.device) -> None:
        """Memory for what the optimizer updates, where that is not the weights."""
        numel = self.shard_slice.stop - self.shard_slice.start
        if self.host_copies is not None:
            self.host = HostShard(numel, self.master_dtype, self.host_copies)
            self.master_shard = self.host.master
        elif self.bucket.has_master:
            self.master_shard = torch.zeros(numel, dtype=self.master_dtype, device=device)

    def _put(self, flat: Tensor, spec: ParameterSpec, first: int, values: Tensor) -> None:
        """Write `values` of the flat elements from `first` on into the weights, and our part into the master."""
        offset = self.bucket.offsets[self.bucket.parameters.index(spec)]
        flat[offset + first : offset + first + values.numel()].copy_(values)
        if not self.has_own_master:
            return
        for piece in self.pieces():
            start, stop = max(piece.start, first), min(piece.stop, first + values.numel())
            if piece.name == spec.name and start < stop:
                where = piece.offset + start - piece.start
                self.master_shard[where : where + stop - start].copy_(values[start - first : stop - first])

    def _fill(self, flat: Tensor, spec: ParameterSpec, initialiser: Initialiser) -> None:
        """Draw a meta parameter's values: all of them, or where weights are sharded only this rank's piece."""
        spans = [(0, spec.numel)]
        if self.transient:
            spans = [(piece.start, piece.stop) for piece in self.pieces() if piece.name == spec.name]
        for start, stop in spans:
            self._put(flat, spec, start, initialiser(spec.name, start, stop, self.master_dtype).reshape(-1))

    def _allocate_gradients(self, allocate: Allocator) -> None:
        if self.policy.shards_gradients and self.bucket.num_shards > 1:
            self.sums_in_shard = True
            self.gradient_shard = allocate(self.bucket.shard_numel(self.owner_index))
            return
        self.gradients = allocate(self.bucket.numel)
        self.gradient_views = self._views(self.gradients)
        self.gradient_shard = self.gradients[self.shard_slice]

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[offset : offset + spec.numel].view(spec.shape)
            for spec, offset in zip(self.bucket.parameters, self.bucket.offsets, strict=True)
        ]

    # Weights of policies that shard parameters.

    def start_gather(self, pool: BufferPool, group: Group) -> list[Handle]:
        """Start gathering the weights into a buffer of `pool`; parameters cannot be read before `finish_gather`."""
        self._gathering = pool.take() if self.common_weights is None else self.common_weights
        return self._distribute(self._gathering[: self.bucket.numel], group)

    def _distribute(self, weights: Tensor, group: Group) -> list[Handle]:
        """Start filling `weights` from all owners."""
        cause = f"gather {self.bucket.name}"
        if self.policy.ownership == "flat":
            return [ops.all_gather(weights, self.weight_shard, group, cause=cause)]
        mine = weights[self.shard_slice]
        if mine.data_ptr() != self.weight_shard.data_ptr():
            mine.copy_(self.weight_shard)
        return [
            ops.broadcast(weights[start:stop], group, index=owner, cause=cause)
            for owner, start, stop in self.bucket.parts()
        ]

    def finish_gather(self) -> None:
        """Make the parameters views of the gathered weights."""
        buffer = self._gathering
        self.weights = buffer[: self.bucket.numel]
        if buffer.data_ptr() not in self._bound:  # a pool has few buffers, and making views costs time
            self._bound[buffer.data_ptr()] = self._views(self.weights)
        for parameter, view in zip(self.parameters, self._bound[buffer.data_ptr()], strict=True):
            parameter.data = view

    def release(self, pool: BufferPool) -> None:
        """Take the memory from the parameters; they keep their shapes and cannot be read."""
        self.weights = None
        for parameter, view in zip(self.parameters, self._without_memory, strict=True):
            parameter.data = view
        if self.common_weights is None:
            pool.give(self._gathering)

    def start_update(self, group: Group) -> list[Handle]:
        """Start gathering updated shards into full weights that stay (zero1, zero2)."""
        assert self.weights is not None
        return self._distribute(self.weights, group)

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a view of the gathered weights."""
        if self.weights is None:
            return False
        return tensor.untyped_storage().data_ptr() == self.weights.untyped_storage().data_ptr()

    def publish(self) -> None:
        """Write what the optimizer updates into this rank's weights, once a step, where these are two memories."""
        if self.has_own_master and not self.is_published:
            self.weight_shard.copy_(self.master_shard, non_blocking=True)
        self.is_published = True

    # Gradients.

    @property
    def update_gradient(self) -> Tensor:
        """What the optimizer reads: the shard's gradient, or its copy in host memory."""
        return self.gradient_shard if self.host is None else self.host.gradient

    def start_fetch(self) -> None:
        """The gradient of this step is complete: start its way to the optimizer, where that is in host memory."""
        if self.host is not None and not self.host.is_fetched and not self.awaits_sum:
            self.host.start_fetch(self.gradient_shard)

    def finish_fetch(self) -> None:
        """Return when the optimizer may read the gradient."""
        if self.host is not None:
            self.host.finish_fetch()

    def start_step(self) -> None:
        """Forget the last step's gradients."""
        self.written.clear()
        self.shard_holds_sum = False
        self.copies_sum = None
        self.is_published = False
        self.awaits_sum = self.is_shared
        if self.host is not None:
            self.host.is_fetched = False

    def start_microbatch(self) -> None:
        """Expect every gradient once more."""
        self.missing = set(range(len(self.parameters)))
        self.lent.clear()
        self.reduced = False
        if self.sums_in_shard:
            self.written.clear()

    @property
    def unreduced(self) -> bool:
        """Whether an open buffer holds gradients of this micro-batch that are not on their way yet."""
        return self.sums_in_shard and self.gradients is not None and not self.reduced

    def open(self, pool: BufferPool) -> None:
        """Give a bucket that keeps only a gradient shard a full buffer for this micro-batch."""
        self._buffer = pool.take()
        buffer = self._buffer[: self.bucket.numel]
        for start, stop in self.bucket.gaps():
            buffer[start:stop].zero_()  # padding of the buffer's last user must not enter the norm
        self.gradients = buffer
        self.gradient_views = self._views(buffer)

    def start_reduction(self, groups: DataGroups) -> None:
        """Start summing the gradients of this micro-batch over the ranks (of one copy, where the policy shards)."""
        assert self.gradients is not None
        self.zero_unwritten()
        self.reduced = True
        cause = f"reduce {self.bucket.name}"
        if not self.policy.shards_optimizer:
            self.reductions = [ops.all_reduce(self.gradients, groups.all, cause=cause)]
        elif self.policy.ownership == "flat":
            self.reductions = [
                ops.reduce_scatter(self._reduced_part, self.gradients, groups.shard, cause=cause)
            ]
        else:
            self.reductions = [
                ops.reduce(self.gradients[start:stop], groups.shard, index=owner, cause=cause)
                for owner, start, stop in self.bucket.parts()
            ]

    def finish_reduction(self) -> None:
        """Return when this rank's part is summed."""
        for handle in self.reductions:
            handle.wait()
        self.reductions = []

    def start_copies_sum(self, group: Group) -> None:
        """Start summing the gradient shard over the copies of the model, once a step."""
        if self.copies_sum is None and group.size > 1:
            self.copies_sum = ops.all_reduce(
                self.gradient_shard,
                group,
                cause=f"copies {self.bucket.name}",
                agreed_numel=self.bucket.numel if self.policy.ownership == "whole" else None,
            )

    @property
    def _reduced_part(self) -> Tensor:
        """Where the reduction leaves this rank's part: flat straight in an empty shard, else in the open buffer."""
        assert self.gradients is not None
        if self.sums_in_shard and not self.shard_holds_sum and self.policy.ownership == "flat":
            return self.gradient_shard
        return self.gradients[self.shard_slice]

    def close(self, pool: BufferPool) -> None:
        """Add the reduced part of the open buffer to the shard and return the buffer."""
        part = self._reduced_part
        if self.shard_holds_sum:
            self.gradient_shard.add_(part)
        elif part.data_ptr() != self.gradient_shard.data_ptr():
            self.gradient_shard.copy_(part)
        self.shard_holds_sum = True
        pool.give(self._buffer)
        self.gradients, self.gradient_views = None, []

    def lend(self, position: int) -> Tensor | None:
        """Where the gradient of a parameter may be computed in place; None once used or already holding a sum."""
        if position in self.written or position in self.lent:
            return None
        self.lent.add(position)
        # A tensor of its own: autograd takes over a gradient without copying only if nobody else refers to it.
        return self.gradient_views[position].detach()

    def take_gradient(self, position: int) -> None:
        """Move a parameter's fresh `.grad` into the flat buffer."""
        parameter, view = self.parameters[position], self.gradient_views[position]
        grad = parameter.grad
        assert grad is not None, f"no gradient in the hook of {self.bucket.parameters[position].name}"
        if position in self.written:
            view.add_(grad)
        else:
            if grad.data_ptr() != view.data_ptr():  # else it was computed in place, in lent memory
                # A copy into place beats zeroing and adding: one pass over memory instead of two.
                view.copy_(grad)
            self.written.add(position)
        parameter.grad = None

    def add_product(self, position: int, left: Tensor, right: Tensor) -> None:
        """Add left · right to a parameter's gradient in one pass over it."""
        view = self.gradient_views[position]
        if position in self.written:
            view.addmm_(left, right)
        else:
            torch.mm(left, right, out=view)
        self.written.add(position)

    def finish_step_sum(self) -> None:
        """A shard whose unit no rank ran in this step holds the last step's sum: clear it."""
        if self.sums_in_shard and not self.shard_holds_sum:
            self.gradient_shard.zero_()

    def zero_unwritten(self) -> None:
        """Parameters without gradient on this rank contribute zeros to the reduction."""
        for position in set(range(len(self.parameters))) - self.written:
            self.gradient_views[position].zero_()


def give_memory(parameter: nn.Parameter, values: Tensor) -> None:
    """Make `values` the memory of `parameter`, also of one on the meta device; every reference to it stays valid."""
    if parameter.is_meta:
        # Not a Parameter made from `values`: that would share the version counter of the flat buffer, and every
        # gather into it would look to autograd like a change of saved weights.
        empty = nn.Parameter(values.new_empty(0), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, empty)
    parameter.data = values
