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
from meshwright.layout.bucket import make_bucket
from meshwright.sharding.engine import ShardingEngine
from meshwright.sharding.memory import BucketMemory

# From which rank to which, and the first and last element of the bucket.
Route = tuple[int, int, int, int]


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
        for memory in engine.gradients.memories:
            places = holders.get(memory.bucket.parameters[0].name, ())
            if len(places) > 1:
                memory.is_shared = True
                self._shared.append((memory, places))
        # The same order on all ranks, and of messages between two.
        self._shared.sort(key=lambda item: (item[1], [spec.name for spec in item[0].bucket.parameters]))
        engine.counted_elsewhere = frozenset(
            name for name, places in holders.items() if len(places) > 1 and groups.place != places[0]
        )

    @property
    def num_messages(self) -> Counter[tuple[str, str]]:
        """Messages of a step on this rank by (operation, axis)."""
        found: Counter[tuple[str, str]] = Counter()
        for memory, places in self._shared:
            for place in places[1:]:
                for source, target in [(place, places[0]), (places[0], place)]:
                    routes = [*self._routes(memory, source, target), *self._flag_routes(source, target)]
                    for one, other, *_ in routes:
                        if one == self._groups.index:
                            found["send", self._groups.to(other).axis] += 1
                        elif other == self._groups.index:
                            found["receive", self._groups.coming_from(one).axis] += 1
        return found

    def sum(self) -> None:
        """Add the gradients of all holders, and note what got one on any of them.

        All that others hold is on its way before anyone waits; then buckets are added in one order on all ranks, so
        that nobody waits for a rank that waits.
        """
        mine = self._groups.place
        uses = [self._uses(memory) for memory, _ in self._shared]
        given = [
            self._give(memory, uses[number], (mine, places[0]), number) if mine != places[0] else []
            for number, (memory, places) in enumerate(self._shared)
        ]
        for number, (memory, places) in enumerate(self._shared):
            used = uses[number]
            if mine == places[0]:
                for place in places[1:]:
                    self._take(memory, used, (place, mine), number, adds=True)
                for place in places[1:]:
                    given[number] += self._give(memory, used, (mine, place), number)
            else:
                for handle in given[number]:  # what is received lies where what was sent lay
                    handle.wait()
                self._take(memory, used, (places[0], mine), number, adds=False)
            for spec, count in zip(memory.bucket.parameters, used.tolist(), strict=True):
                if count:
                    self._engine.gradients.mark_used(spec.name)
            memory.awaits_sum = False
            memory.start_fetch()
        for handle in (handle for handles in given for handle in handles):
            handle.wait()

    def _uses(self, memory: BucketMemory) -> Tensor:
        names = [spec.name for spec in memory.bucket.parameters]
        used = torch.tensor(
            [float(self._engine.gradients.is_used(name)) for name in names], dtype=torch.float64
        )
        return used.to(self._engine.device)

    def _routes(self, memory: BucketMemory, source: int, target: int) -> list[Route]:
        """How the gradients of one place come to another."""
        teams = [self._groups.team_at(place) for place in (source, target)]
        if not self._groups.teams:
            where = memory.shard_slice
            return [(*teams[0], *teams[1], where.start, where.stop)]
        bucket = memory.bucket
        end = (
            bucket.offsets[-1] + bucket.parameters[-1].numel
        )  # padding behind it depends on the number of ranks
        if not self._engine.policy.shards_optimizer:  # alike on all ranks of a place
            return [(teams[0][i % len(teams[0])], rank, 0, end) for i, rank in enumerate(teams[1])]
        alignment = self._engine.policy.alignment_numel
        spans = [
            make_bucket(bucket.name, bucket.parameters, num_shards=len(team), alignment_numel=alignment).spans
            for team in teams
        ]
        found = []
        for to, (low, high) in zip(teams[1], spans[1], strict=True):
            for one, (start, stop) in zip(teams[0], spans[0], strict=True):
                first, last = max(low, start), min(high, stop, end)
                if first < last:
                    found.append((one, to, first, last))
        return found

    def _flag_routes(self, source: int, target: int) -> list[tuple[int, int]]:
        """Who tells whom what got a gradient: each rank of `source` one of `target`, whose ranks agree later."""
        ours, theirs = self._groups.team_at(source), self._groups.team_at(target)
        return [(rank, theirs[i % len(theirs)]) for i, rank in enumerate(ours)]

    def _give(self, memory: BucketMemory, used: Tensor, way: tuple[int, int], number: int) -> list[Handle]:
        """Start sending this rank's part from one place to another."""
        base, handles, me = memory.shard_slice.start, list[Handle](), self._groups.index
        cause = f"shared {memory.bucket.name}"
        sent = [
            (to, memory.gradient_shard[first - base : last - base], 2 * number)
            for one, to, first, last in self._routes(memory, *way)
            if one == me
        ]
        sent += [(to, used, 2 * number + 1) for one, to in self._flag_routes(*way) if one == me]
        for to, values, tag in sent:
            handles.append(ops.send(values, self._groups.to(to), index=to, tag=tag, cause=cause))
        return handles

    def _take(
        self, memory: BucketMemory, used: Tensor, way: tuple[int, int], number: int, *, adds: bool
    ) -> None:
        """Receive what comes from one place to another, and add it or take it over."""
        base, me, cause = memory.shard_slice.start, self._groups.index, f"shared {memory.bucket.name}"
        wanted = [
            (one, memory.gradient_shard[first - base : last - base], 2 * number, adds)
            for one, to, first, last in self._routes(memory, *way)
            if to == me
        ]
        wanted += [(one, used, 2 * number + 1, True) for one, to in self._flag_routes(*way) if to == me]
        for one, values, tag, sums in wanted:
            group = self._groups.coming_from(one)
            buffer = torch.empty_like(values) if sums else values
            ops.receive(buffer, group, index=one, tag=tag, cause=cause).wait()
            if sums:
                values.add_(buffer)
