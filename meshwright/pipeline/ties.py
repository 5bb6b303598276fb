"""Parameters that several ranks of a pipeline hold: their gradients summed once a step, so that they stay equal.

Such are tied weights on different stages, and all weights where each stage is on two ranks. They lie in buckets that
are alike on all their holders, so what is summed is the shard that each holds after its data-parallel reduction. The
first holder adds in the order of the pipeline and sends the sum back: all get the same bits. It also counts them in the
norm and writes them in checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.comm import ops
from meshwright.comm.ops import Handle, PipelineGroups
from meshwright.sharding.engine import ShardingEngine
from meshwright.sharding.memory import BucketMemory


class SharedParameters:
    """Sums over the holders.

    Args:
        engine: of this rank.
        groups: the ranks of the pipeline.
        holders: parameter name to the places of its holders, where there are several.
    """

    def __init__(
        self, engine: ShardingEngine, groups: PipelineGroups, holders: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._engine, self._groups = engine, groups
        self._shared: list[tuple[BucketMemory, tuple[int, ...]]] = []
        for memory in engine.trained_memories:
            places = holders.get(memory.bucket.parameters[0].name, ())
            if len(places) > 1:
                memory.is_shared = True
                self._shared.append((memory, places))
        # The same order on all ranks, and of messages between two.
        self._shared.sort(key=lambda item: (item[1], [spec.name for spec in item[0].bucket.parameters]))
        engine.counted_elsewhere = frozenset(
            name for name, places in holders.items() if len(places) > 1 and groups.index != places[0]
        )

    @property
    def num_messages(self) -> Counter[tuple[str, str]]:
        """Messages of a step on this rank by (operation, axis)."""
        found: Counter[tuple[str, str]] = Counter()
        for _, places in self._shared:
            first = self._groups.index == places[0]
            for place in places[1:] if first else places[:1]:
                found["send", self._groups.to(place).axis] += 2
                found["receive", self._groups.coming_from(place).axis] += 2
        return found

    def sum(self) -> None:
        """Add the gradients of all holders, and note what got one on any of them.

        All that others hold is on its way before anyone waits; then buckets are added in one order on all ranks, so
        that nobody waits for a rank that waits.
        """
        uses = [self._uses(memory) for memory, _ in self._shared]
        handles: list[Handle] = []
        for number, (memory, places) in enumerate(self._shared):
            if self._groups.index != places[0]:
                handles += self._send(memory.gradient_shard, uses[number], places[0], number)
        mine = handles
        handles = []
        for number, (memory, places) in enumerate(self._shared):
            gradient, used = memory.gradient_shard, uses[number]
            if self._groups.index == places[0]:
                for place in places[1:]:
                    part, more = torch.empty_like(gradient), torch.empty_like(used)
                    self._receive(part, more, place, number)
                    gradient.add_(part)
                    used.add_(more)
                for place in places[1:]:
                    handles += self._send(gradient, used, place, number)
            else:
                for handle in mine[:2]:  # what is received lies where what was sent lay
                    handle.wait()
                del mine[:2]
                self._receive(gradient, used, places[0], number)
            for spec, count in zip(memory.bucket.parameters, used.tolist(), strict=True):
                if count:
                    self._engine.mark_used(spec.name)
            memory.awaits_sum = False
            memory.start_fetch()
        for handle in handles:
            handle.wait()

    def _uses(self, memory: BucketMemory) -> Tensor:
        names = [spec.name for spec in memory.bucket.parameters]
        used = torch.tensor([float(self._engine.is_used(name)) for name in names], dtype=torch.float64)
        return used.to(self._engine.device)

    def _send(self, gradient: Tensor, used: Tensor, place: int, number: int) -> list[Handle]:
        group, cause = self._groups.to(place), self._cause(number)
        return [
            ops.send(gradient, group, index=place, tag=2 * number, cause=cause),
            ops.send(used, group, index=place, tag=2 * number + 1, cause=cause),
        ]

    def _receive(self, gradient: Tensor, used: Tensor, place: int, number: int) -> None:
        group, cause = self._groups.coming_from(place), self._cause(number)
        ops.receive(gradient, group, index=place, tag=2 * number, cause=cause).wait()
        ops.receive(used, group, index=place, tag=2 * number + 1, cause=cause).wait()

    def _cause(self, number: int) -> str:
        return f"shared {self._shared[number][0].bucket.name}"
