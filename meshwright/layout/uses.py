"""What zero3 costs a model that uses its units in any order: collectives counted from the order of use.

`layout/accounting.py` has the closed form for models that use every unit once, in order; here the same rules are
followed unit by unit: gathered before use and one ahead of what the last micro-batch predicts, freed after use, kept
while another backward of the unit is to come, reduced once. Knows no tensors and no modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from meshwright.layout.accounting import num_calls, shard_calls
from meshwright.layout.bucket import Unit
from meshwright.layout.policy import ShardingPolicy


@dataclass(frozen=True)
class UnitUses:
    """How one micro-batch used modules that may be units.

    Attributes:
        forwards: names in the order of calls, each with whether its output has a backward of its own.
        backwards: names in the order in which backwards start (True) or recompute the module (False).
        trained: names of the parameters that got a gradient.
    """

    forwards: tuple[tuple[str, bool], ...]
    backwards: tuple[tuple[str, bool], ...]
    trained: frozenset[str]


def calls_of_uses(
    policy: ShardingPolicy,
    units: Sequence[Unit],
    uses: Iterable[UnitUses],
    *,
    again: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[Counter[str]]:
    """Logical collectives of zero3 in each micro-batch in turn, by operation, on each rank.

    `again`: name of a unit to those that run again, in order, when its backward begins (`plan.recompute`).
    """
    assert policy.shards_parameters, f"{policy.name} does not gather by use"
    if not units or units[0].buckets[0].num_shards == 1:
        return [Counter() for _ in uses]
    gathering = _Gathering(policy, {unit.name: unit for unit in units}, again)
    return [gathering.micro_batch(use) for use in uses]


@dataclass(frozen=True)
class StagePass:
    """A forward or a backward of one stage of a pipeline on a rank.

    Attributes:
        stage: number of the stage.
        is_forward: which of both.
        uses: what the micro-batch uses, of the whole model.
        modules: those that the stage calls as wholes, in order.
        again: of these, what runs again when their backwards begin.
    """

    stage: int
    is_forward: bool
    uses: UnitUses
    modules: tuple[str, ...]
    again: Mapping[str, Sequence[str]] = field(default_factory=dict)


def calls_of_passes(
    policy: ShardingPolicy, units: Sequence[Unit], passes: Iterable[StagePass]
) -> Counter[str]:
    """Logical collectives of zero3 in a step on a rank of a pipeline, whose stages take turns.

    Simplification: a module that several stages call has all of its backwards on each of them.
    """
    assert policy.shards_parameters, f"{policy.name} does not gather by use"
    if not units or units[0].buckets[0].num_shards == 1:
        return Counter()
    gathering = _Gathering(policy, {unit.name: unit for unit in units}, {})
    for one in passes:
        gathering.turn(one)
    return +gathering.calls


def reruns_in(again: Mapping[str, Sequence[str]], modules: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Of `again`, see `calls_of_uses`, what holds for a stage that has `modules` alone.

    A part of a chain that other stages have the rest of runs again as one, when its last layer's backward begins.
    """
    found: dict[str, tuple[str, ...]] = {}
    broken: set[str] = set()
    for name, ran in sorted(again.items(), key=lambda item: -len(item[1])):
        here = tuple(module for module in ran if module in modules)
        if here and here[-1] not in broken:
            found[name if here == tuple(ran) else here[-1]] = here
            broken |= set() if here == tuple(ran) else set(here)
    return found


@dataclass
class _Gathering:
    """Which units are gathered, and what was predicted."""

    policy: ShardingPolicy
    units: dict[str, Unit]
    again: Mapping[str, Sequence[str]]
    calls: Counter[str] = field(default_factory=Counter)
    held: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        # Of each stage; None: there are none. Of a stage nothing is known before its first forward.
        self.expected: dict[int | None, list[str]] = {None: [name for name in self.units if name]}

    def micro_batch(self, uses: UnitUses) -> Counter[str]:
        """Follow one micro-batch; returns its calls."""
        self.calls = Counter()
        order = [name for name, _ in uses.forwards if name in self.units]
        self._forward(order)
        self._backward(order, uses)
        return +self.calls

    def turn(self, one: StagePass) -> None:
        """Follow one pass of a stage."""
        order = [name for name in one.modules if name in self.units]
        self.again = one.again
        if one.is_forward:
            self._forward(order, one.stage)
            return
        here = {*order, ""}
        trained = {p.name for n in here & {*self.units} for b in self.units[n].buckets for p in b.parameters}
        uses = UnitUses(
            tuple(use for use in one.uses.forwards if use[0] in here),
            tuple(use for use in one.uses.backwards if use[0] in here),
            one.uses.trained & trained,
        )
        self._backward(order, uses)

    def _forward(self, order: list[str], stage: int | None = None) -> None:
        expected = self.expected.get(stage, [])
        self._gather("")
        self._gather_ahead(expected, 0)
        for position, name in enumerate(order, start=1):
            self._gather(name)
            self._gather_ahead(expected, position)
            stays = self.policy.keep_last and 0 < len(expected) <= position
            if "" in self.units or not stays:
                self.held.discard(name)
        self.expected[stage] = order or expected

    def _backward(self, order: list[str], uses: UnitUses) -> None:
        last = "" if "" in self.units else order[-1] if order else None
        self.held &= {last if self.policy.keep_last else None}
        pending = Counter(name for name, counts in uses.forwards if counts)
        self._follow(order, pending, [use for use in uses.backwards if use[0] in self.units])
        for name, unit in self.units.items():
            # The root is always reduced; a block where its backward was seen, or left something to reduce.
            if unit.is_root or pending[name] or self._is_trained(unit, uses.trained):
                trained = [bucket for bucket in unit.buckets if bucket.trainable]
                self.calls[shard_calls(self.policy)[0]] += num_calls(self.policy, trained)
        self.held.clear()

    def _follow(self, order: list[str], pending: Counter[str], starts: list[tuple[str, bool]]) -> None:
        left, open_unit, position = Counter(pending), "", len(order)
        self._gather("")
        self._gather_ahead(order, position - 1)
        for name, is_start in starts:
            if not is_start:
                self._gather(name)
                continue
            if open_unit not in ("", name) and not left[open_unit]:
                self.held.discard(open_unit)
            self._gather(name)
            left[name] -= 1
            open_unit = name
            position = max((i for i in range(position) if order[i] == name), default=0)
            self._gather_ahead(order, position - 1)
            for other in self.again.get(name, ()):
                if other not in self.held:
                    self._gather(other)
                    self.held.discard(other)

    def _gather_ahead(self, order: list[str], position: int) -> None:
        if 0 <= position < len(order):
            self._gather(order[position])

    def _gather(self, name: str) -> None:
        if name in self.units and name not in self.held:
            self.held.add(name)
            self.calls[shard_calls(self.policy)[1]] += num_calls(self.policy, self.units[name].buckets)

    @staticmethod
    def _is_trained(unit: Unit, trained: frozenset[str]) -> bool:
        return any(parameter.name in trained for bucket in unit.buckets for parameter in bucket.parameters)
