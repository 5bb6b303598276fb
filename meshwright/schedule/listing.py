"""List scheduling: whenever a rank is free it takes the best action that is ready, by a fixed rule.

The maker of schedules that have no closed form: a bidirectional one, and the start of a search. A limit of activations
is kept on every rank: a forward is only taken where its backward can still come, so a limit slows a schedule and never
stops it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.schedule.action import Action, Program
from meshwright.schedule.check import gives, needs_of
from meshwright.schedule.timing import Durations

# Smaller is taken first.
Rule = Callable[[Action], tuple[float, ...]]


@dataclass(frozen=True)
class Shop:
    """What has to be scheduled.

    Attributes:
        num_stages: parts of the model.
        num_microbatches: micro-batches of a step.
        placement: for each slot, the rank of each stage; micro-batches take the slots in turn.
        durations: of each stage.
        limits: most stage activations that each rank may keep, or None.
        splits_backward: whether weight gradients are actions of their own.
    """

    num_stages: int
    num_microbatches: int
    placement: tuple[tuple[int, ...], ...]
    durations: Durations
    limits: tuple[int, ...] | None = None
    splits_backward: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return max(max(ranks) for ranks in self.placement) + 1

    def slot_of(self, microbatch: int) -> int:
        """Which placement a micro-batch follows."""
        return microbatch % len(self.placement)

    def actions(self) -> list[tuple[int, Action]]:
        """(rank, action) of everything, in order of micro-batches."""
        ops = ("F", "I", "W") if self.splits_backward else ("F", "B")
        made = []
        for m in range(self.num_microbatches):
            slot = self.slot_of(m)
            for stage in range(self.num_stages):
                for op in ops:
                    action = Action(op, stage, m, slot=slot)  # type: ignore[arg-type]
                    made.append((self.placement[slot][stage], action))
        return made


def list_schedule(shop: Shop, rule: Rule) -> tuple[Program, ...] | None:
    """Programs by `rule`; None where the limits let no action go on."""
    listing = _Listing(shop, rule)
    return listing.programs if listing.run() else None


class _Listing:
    def __init__(self, shop: Shop, rule: Rule) -> None:
        self._shop = shop
        self._rule = rule
        self._open: list[list[tuple[tuple[float, ...], int, Action]]] = [[] for _ in range(shop.num_ranks)]
        self._programs: list[list[Action]] = [[] for _ in range(shop.num_ranks)]
        self._kept = [0] * shop.num_ranks
        self._free_at = [0.0] * shop.num_ranks
        self._missing: dict[Action, int] = {}
        self._users: dict[tuple[str, int, int], list[tuple[int, Action]]] = {}
        self._events: list[
            tuple[float, int, int, Action | None]
        ] = []  # time, order, rank, what is ready there
        self._order = itertools.count()  # ties go to whoever came first
        self._left = 0
        for rank, action in shop.actions():
            self._left += 1
            needs = needs_of(action, shop.num_stages)
            self._missing[action] = len(needs)
            for need in needs:
                self._users.setdefault(need, []).append((rank, action))
            if not needs:
                self._push(0.0, rank, action)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The orders made so far."""
        return tuple(map(tuple, self._programs))

    def run(self) -> bool:
        """Take actions until none is left; False where none can be taken."""
        while self._events:
            now = self._events[0][0]
            woken = set()
            while self._events and self._events[0][0] == now:
                _, _, rank, action = heapq.heappop(self._events)
                if action is not None:
                    heapq.heappush(self._open[rank], (self._rule(action), next(self._order), action))
                woken.add(rank)
            for rank in sorted(woken):
                if self._free_at[rank] <= now:
                    self._take(rank, now)
        return self._left == 0

    def _push(self, time: float, rank: int, action: Action | None) -> None:
        heapq.heappush(self._events, (time, next(self._order), rank, action))

    def _take(self, rank: int, now: float) -> None:
        refused, chosen = [], None
        while self._open[rank] and chosen is None:
            entry = heapq.heappop(self._open[rank])
            if self._may_take(rank, entry[2]):
                chosen = entry[2]
            else:
                refused.append(entry)
        for entry in refused:
            heapq.heappush(self._open[rank], entry)
        if chosen is None:
            return
        self._programs[rank].append(chosen)
        self._left -= 1
        self._kept[rank] += {"F": 1, "I": 0}.get(chosen.op, -1)
        end = now + self._shop.durations.of(chosen)
        self._free_at[rank] = end
        self._push(end, rank, None)
        for user_rank, user in self._users.get(gives(chosen), ()):
            self._missing[user] -= 1
            if not self._missing[user]:
                delay = self._shop.durations.transfer if user_rank != rank else 0.0
                self._push(end + delay, user_rank, user)

    def _may_take(self, rank: int, action: Action) -> bool:
        if action.op != "F" or self._shop.limits is None:
            return True
        return self._kept[rank] + self._reserve(rank, action) < self._shop.limits[rank]

    def _reserve(self, rank: int, action: Action) -> int:
        """Room left for the later stages of this micro-batch on the same rank: its backward comes through them."""
        ranks = self._shop.placement[action.slot]
        return sum(1 for stage in range(action.stage + 1, self._shop.num_stages) if ranks[stage] == rank)
