"""What a rank of the run under test declares that it will issue: collectives and messages of a step, by formulas.

Owns how the formulas of layouts, policies, attention and schedules add up on one rank. Must not know what was issued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.comm.ops import DataGroups
from meshwright.layout.accounting import copies_calls, declared_calls
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.layout.uses import StagePass, calls_of_passes, calls_of_uses, reruns_in
from meshwright.training.cut_matrices import cut_matrices
from meshwright.verification.job import Uses
from meshwright.verification.rank import CandidateRank


def declared_steps(
    rank: CandidateRank,
    groups: DataGroups,
    uses: Sequence[Uses],
    attention: Sequence[Counter[str]],
    *,
    num_microbatches: int,
) -> tuple[dict[str, int], ...]:
    """Collectives of each step by name: `all_gather over dp_shard`.

    Args:
        rank: after its steps.
        groups: its own.
        uses: of each micro-step of the reference.
        attention: of each step, what calls of attention over cut sequences stand for.
        num_microbatches: micro-steps of a step.
    """
    steps = range(len(uses) // num_microbatches)
    declaring = _Declaring(rank, groups, uses, num_microbatches)
    found = []
    for step in steps:
        named = declaring.of_step(step)
        context = groups.context
        if context is not None and step < len(attention):
            for op, count in attention[step].items():
                named[call_name(op, context.axis)] += count
        found.append({name: count for name, count in named.items() if count})
    return tuple(found)


def call_name(op: str, axis: str) -> str:
    """An operation for people: of a part of the data-parallel ranks with its axis."""
    return op if axis == "dp" else f"{op} over {axis}"


@dataclass(frozen=True, eq=False)
class _Declaring:
    rank: CandidateRank
    groups: DataGroups
    uses: Sequence[Uses]
    num_microbatches: int

    def of_step(self, step: int) -> Counter[str]:
        rank, groups = self.rank, self.groups
        engine, executor = rank.engine, rank.executor
        part = self.uses[step * self.num_microbatches : (step + 1) * self.num_microbatches]
        named: Counter[str] = Counter()
        _add(named, self._sharding(step), engine.owners.axis)
        copies = engine.groups.replicate
        between = copies_calls(engine.units, num_copies=copies.size if engine.policy.shards_optimizer else 1)
        _add(named, between, copies.axis)
        if groups.all.size > 1:
            named["all_reduce"] += 1
        if groups.workers.size > 1:
            sums = sum(_num_statistics(use, rank.again, self._has) for use in part)
            _add(named, {"all_reduce": sums}, groups.workers.axis)
        if groups.model is not None:
            _add(named, {"all_reduce": 1}, groups.model.axis)
        if executor is not None:
            for (op, axis), count in executor.num_messages.items():
                named[call_name(op, axis)] += count
        if groups.tensor is not None:
            _add(named, self._tensor(), groups.tensor.axis)
        return named

    def _sharding(self, step: int) -> Counter[str]:
        """Of the ranks that divide the update of one copy."""
        engine, executor, per_step = self.rank.engine, self.rank.executor, self.num_microbatches
        if not engine.policy.shards_parameters:
            backwards = per_step if executor is None else executor.num_backwards
            return declared_calls(engine.policy, engine.units, num_microbatches=backwards)
        used = [use.units for use in self.uses[: (step + 1) * per_step]]
        if executor is None:
            calls = calls_of_uses(engine.policy, engine.units, used, again=self.rank.again)
            return sum(calls[step * per_step :], Counter[str]())
        before = [one for number in range(step) for one in self._passes(number)]
        through = calls_of_passes(engine.policy, engine.units, [*before, *self._passes(step)])
        return through - calls_of_passes(engine.policy, engine.units, before)

    def _passes(self, step: int) -> Iterator[StagePass]:
        assert self.rank.executor is not None, "only a pipeline has passes"
        for one in self.rank.executor.passes:
            uses = self.uses[step * self.num_microbatches + one.microbatch].units
            again = reruns_in(self.rank.again, one.modules)
            yield StagePass(one.stage, one.is_forward, uses, one.modules, again)

    def _tensor(self) -> Counter[str]:
        """Of the ranks that share matrices, but for what they agree on."""
        engine, again = self.rank.engine, self.rank.again
        layout = engine.tensor_layout or TensorLayout(1, 0)
        buckets = [bucket for unit in engine.units for bucket in unit.buckets if bucket.trainable]
        calls = Counter({"all_reduce": sum(bucket.parameters[0].is_partial for bucket in buckets)})
        calls["all_to_all"] += self._num_exchanges()
        if self.rank.executor is None:
            once = layout.calls + layout.calls_again(_all_of(again))
            return calls + Counter({op: count * self.num_microbatches for op, count in once.items()})
        for one in self.rank.executor.passes:
            if one.is_forward:
                reruns = _all_of(
                    reruns_in(again, [name for names in again.values() for name in names if one.runs(name)])
                )
                calls += layout.calls_of(one.runs) + layout.calls_again(reruns)
        return calls

    def _has(self, module: str) -> bool:
        """Whether a module is on this rank."""
        found = self.rank.engine.model.get_submodule(module)
        return self.rank.executor is None or next(found.parameters(), None) is not None

    def _num_exchanges(self) -> int:
        """All-to-alls of whole matrices in an update: two a round, rounds of what is updated together."""
        engine, cut = self.rank.engine, cut_matrices(self.rank.engine)
        if cut is None or self.rank.state.optimizer.name != "muon":
            return 0
        counts = [sum(shard.parameter in cut.cuts for shard in part) for part in engine.parts_of_update()]
        return sum(2 * cut.num_rounds(count) for count in counts)


def _add(named: Counter[str], calls: Mapping[str, int], axis: str) -> None:
    for op, count in calls.items():
        named[call_name(op, axis)] += count


def _all_of(again: Mapping[str, Sequence[str]]) -> list[str]:
    return [name for names in again.values() for name in names]


def _num_statistics(
    uses: Uses, again: Mapping[str, Sequence[str]], has: Callable[[str], bool] = lambda _: True
) -> int:
    """Sums of batch statistics of a micro-step, also of modules that run again, of those that a rank has."""
    reruns = _all_of(again)
    repeated = sum(
        count * sum(layer == name or layer.startswith(f"{name}.") for name in reruns)
        for layer, count in uses.forward_statistics
        if has(layer)
    )
    here = sum(count for layer, count in uses.forward_statistics if has(layer))
    everywhere = sum(count for _, count in uses.forward_statistics)
    # As many in backward as in forward, wherever a layer is.
    return uses.num_statistics * here // max(1, everywhere) + repeated
