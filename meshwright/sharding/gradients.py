"""Gradients of one rank on their way from autograd to the sums over all ranks.

Hooks of parameters hand each gradient over as autograd completes it; it goes into its bucket's flat buffer, and
complete buckets are reduced in one order on all ranks, beside the rest of the backward. What is incomplete at the end
of a backward is reduced too, so that a missing gradient hangs nobody.

Owns when a bucket is reduced, and which parameters got a gradient. Must not know weights or optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from meshwright.comm import ops
from meshwright.comm.ops import DataGroups
from meshwright.errors import LoopError
from meshwright.layout.policy import ShardingPolicy
from meshwright.sharding.memory import BucketMemory, BufferPool

# Reductions that stay in flight behind the newest backward work: more hides nothing (the next one waits for the
# wire) and each holds a buffer. `layout/accounting.py` counts these buffers.
REDUCTIONS_IN_FLIGHT = 1


class Gradients:
    """Takes the gradients of one model and sums them.

    Args:
        memories: the buckets that get gradients, in the order of their reductions.
        policy: of the engine.
        groups: the data-parallel ranks.
        pools: where open gradients get their memory.
        root: of a model that is gathered unit by unit, the buckets of no unit: what tells that a unit is done reduces
            the others. None: buckets are reduced as they become complete.

    Attributes:
        in_backward: whether gradients are taken now; elsewhere they are not the step's.
    """

    def __init__(
        self,
        memories: Sequence[BucketMemory],
        policy: ShardingPolicy,
        groups: DataGroups,
        *,
        pools: Mapping[BucketMemory, BufferPool],
        root: Sequence[BucketMemory] | None,
    ) -> None:
        self.in_backward = False
        self.memories = memories
        self._policy, self._groups, self._pools, self._root = policy, groups, pools, root
        self._used: set[str] = set()
        self._last = True
        self._next_bucket = 0
        self._in_flight: list[BucketMemory] = []
        # Hooks of a tensor live in C++, where Python's collector sees no cycle: one that held this would keep the
        # model and the threads of its process groups for ever.
        this = weakref.ref(self)
        for number, memory in enumerate(memories):
            for position, parameter in enumerate(memory.parameters):
                parameter.register_post_accumulate_grad_hook(
                    lambda _p, number=number, position=position: _take_for(this, number, position)
                )

    # A step.

    def start_step(self) -> None:
        """Forget the last step's gradients."""
        self._used.clear()
        for memory in self.memories:
            memory.start_step()

    def expect(self, *, last: bool) -> None:
        """Before a backward; `last` says that none follows in this step."""
        self._last = last
        self._next_bucket = 0
        for memory in self.memories:
            memory.start_microbatch()

    def reduce(self, memories: Iterable[BucketMemory]) -> None:
        """Start the reductions of these buckets, those that get gradients."""
        for memory in memories:
            if memory.bucket.trainable:
                self._reduce(memory)

    def finish_microbatch(self) -> None:
        """After a backward: reduce what is incomplete; after the last one every shard holds the sum of the step."""
        if self._root is not None:
            self.reduce(self._root)
        elif self._reduces_now:
            self.reduce(self.memories[self._next_bucket :])
        self._drain(0)
        if self._last:
            self._finish_sums()

    def _finish_sums(self) -> None:
        """Sum over all copies of the model, and over tp what its ranks have parts of."""
        for memory in self.memories:
            memory.finish_step_sum()
            if self._policy.shards_optimizer:  # not yet begun where the last micro-batch left the bucket out
                memory.start_copies_sum(self._groups.replicate)
        for memory in self.memories:
            if memory.copies_sum is not None:
                memory.copies_sum.wait()
            if _is_partial(memory) and self._groups.tensor is not None:
                total = ops.all_reduce(memory.gradient_shard, self._groups.tensor, cause="partial gradients")
                total.wait()
            memory.start_fetch()

    # Which parameters got one.

    def is_used(self, name: str) -> bool:
        """Whether a parameter got a gradient on this rank in this step."""
        return name in self._used

    def mark_used(self, name: str) -> None:
        """A parameter got a gradient on another rank that holds it."""
        self._used.add(name)

    # What layers do with the memory of a gradient.

    def adder(self, parameter: nn.Parameter) -> Callable[[Tensor, Tensor], bool] | None:
        """For a trained parameter: a function that adds the product of two matrices to its gradient, past autograd.

        Hooks of the parameter do not see it. The gradient is complete when autograd has come to the parameter with
        nothing, or at the end of the backward. The function returns False, and does nothing, outside of backward. None
        where the product has another dtype than the sum.
        """
        place = self._place_of(parameter)
        return None if place is None else partial(self._add_product, *place)

    def _add_product(self, memory: BucketMemory, position: int, left: Tensor, right: Tensor) -> bool:
        if not self.in_backward:  # e.g. torch.autograd.grad inside the loss: its result is the user's
            return False
        self._admit(memory, position)
        memory.add_product(position, left, right)
        return True

    def lender(self, parameter: nn.Parameter) -> Callable[[], Tensor | None] | None:
        """For a trained parameter: a function that lends the memory where its gradient belongs, in backward.

        It returns None where the gradient must not be written in place: a second use in the same micro-batch, or a
        sum of earlier ones already there.
        """
        place = self._place_of(parameter)
        return None if place is None else partial(self._lend, *place)

    def _lend(self, memory: BucketMemory, position: int) -> Tensor | None:
        if not self.in_backward:  # as above
            return None
        if memory.gradients is None:
            memory.open(self._pools[memory])
        return memory.lend(position)

    def _place_of(self, parameter: nn.Parameter) -> tuple[BucketMemory, int] | None:
        """Where a product of this parameter's type may be written."""
        for memory in self.memories:
            if memory.bucket.has_master:  # no product of 16 bits writes float32 (docs/decisions/013)
                continue
            for position, candidate in enumerate(memory.parameters):
                if candidate is parameter:
                    return memory, position
        return None

    # From autograd to the reductions.

    @property
    def _reduces_now(self) -> bool:
        return self._policy.shards_gradients or self._last

    def _take(self, memory: BucketMemory, position: int) -> None:
        if memory.parameters[position].grad is not None:
            self._admit(memory, position)
            memory.take_gradient(position)
        elif not self.in_backward:
            return
        memory.missing.discard(position)  # else it was added past autograd, or there is none
        if not memory.missing and self._root is None and self._reduces_now:
            self._reduce_in_order()

    def _admit(self, memory: BucketMemory, position: int) -> None:
        name = memory.bucket.parameters[position].name
        if not self.in_backward:
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
            memory.open(self._pools[memory])
        self._used.add(name)

    def _reduce_in_order(self) -> None:
        """Start reductions of complete buckets, never one before its predecessors: every rank the same order."""
        while self._next_bucket < len(self.memories) and not self.memories[self._next_bucket].missing:
            self._reduce(self.memories[self._next_bucket])
            self._next_bucket += 1

    def _reduce(self, memory: BucketMemory) -> None:
        if memory.sums_in_shard and memory.gradients is None:
            memory.open(self._pools[memory])  # no parameter of it got a gradient here; a peer may have some
        memory.start_reduction(self._groups)
        self._in_flight.append(memory)
        if self._policy.shards_optimizer:
            self._drain(REDUCTIONS_IN_FLIGHT)

    def _drain(self, keep: int) -> None:
        while len(self._in_flight) > keep:
            memory = self._in_flight.pop(0)
            memory.finish_reduction()
            if memory.sums_in_shard:
                memory.close(self._pools[memory])
            if self._last and self._policy.shards_optimizer and self._groups.replicate.size > 1:
                memory.start_copies_sum(self._groups.replicate)  # behind the rest of the backward
            elif self._last and not _is_partial(memory):
                memory.start_fetch()


def _is_partial(memory: BucketMemory) -> bool:
    """Whether the ranks of a copy of the model have each a part of the sum."""
    return memory.bucket.parameters[0].is_partial


def _take_for(reference: weakref.ref[Gradients], number: int, position: int) -> None:
    """The hook of parameter `position` of bucket `number`: its gradient is complete."""
    gradients = reference()
    if gradients is not None:
        gradients._take(gradients.memories[number], position)
