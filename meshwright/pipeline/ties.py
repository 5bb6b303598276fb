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
        """Add the gradients of all holders, and note what got one on any of them."""
        handles: list[Handle] = []
        for number, (memory, places) in enumerate(self._shared):
            names = [spec.name for spec in memory.bucket.parameters]
            used = torch.tensor([float(self._engine.is_used(name)) for name in names], dtype=torch.float64)
            used = used.to(self._engine.device)
            gradient = memory.gradient_shard
            cause = f"shared {memory.bucket.name}"
            first, others = places[0], places[1:]
            if self._groups.index == first:
                for place in others:
                    part, more = torch.empty_like(gradient), torch.empty_like(used)
                    self._receive(part, place, 2 * number, cause)
                    self._receive(more, place, 2 * number + 1, cause)
                    gradient.add_(part)
                    used.add_(more)
                for place in others:
                    handles += self._send(gradient, used, place, number, cause)
            else:
                for handle in self._send(gradient, used, first, number, cause):
                    handle.wait()
                self._receive(gradient, first, 2 * number, cause)
                self._receive(used, first, 2 * number + 1, cause)
            for name, uses in zip(names, used.tolist(), strict=True):
                if uses:
                    self._engine.mark_used(name)
            memory.awaits_sum = False
            memory.start_fetch()
        for handle in handles:
            handle.wait()

    def _send(
        self, gradient: torch.Tensor, used: torch.Tensor, place: int, number: int, cause: str
    ) -> list[Handle]:
        group = self._groups.to(place)
        return [
            ops.send(gradient, group, index=place, tag=2 * number, cause=cause),
            ops.send(used, group, index=place, tag=2 * number + 1, cause=cause),
        ]

    def _receive(self, tensor: torch.Tensor, place: int, tag: int, cause: str) -> None:
        ops.receive(tensor, self._groups.coming_from(place), index=place, tag=tag, cause=cause).wait()
