"""What a silent fault is: a way to be wrong that raises nothing, and the place where one is committed.

Owns the values and the draw of a site. A fault is committed by shadowing methods of the objects that one candidate rank
trains with (its engine, buckets, transport, optimizer, samples, loss, modules), never anything that compares and
nothing that outlives them. Knows no single fault.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from meshwright.adapt.batch_norm import BatchNorm
from meshwright.errors import ConfigError
from meshwright.verification.rank import CandidateRank


@dataclass(frozen=True)
class Place:
    """Where in a model a fault may be committed.

    Attributes:
        name: of a bucket, parameter, buffer or module; empty: everywhere.
        tensors: what `verify` may name for it: parameters, buffers or modules; empty: anything.
        ranks: on which ranks; empty: on any.
    """

    name: str = ""
    tensors: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Site:
    """One place and time, the same on all ranks.

    Attributes:
        rank: global rank, for faults of one rank.
        other: another rank.
        step: optimizer step, from 1.
        microbatch: micro-step, from 0.
        place: where in the model.
    """

    rank: int
    other: int
    step: int
    microbatch: int
    place: Place


def everywhere(_candidate: CandidateRank) -> tuple[Place, ...]:
    """The places of a fault that has none."""
    return (Place(),)


@dataclass(frozen=True)
class SilentFault:
    """A way to compute something else without any error.

    Attributes:
        name: in the registry.
        theme: kind of fault, for tables.
        description: what happens.
        source: public report of this kind of fault: `owner/repository#number`, or an address.
        expected: checks of `verify` that may be the first to fail.
        inject: commits it on one rank; all ranks call it with the same site.
        needs: conditions on plan, model and data: names in `NEEDS`.
        places: where in the model it may be committed.
        first_step: earliest step at which it has an effect.
        spare_steps: steps that must follow, because the effect comes later.
    """

    name: str
    theme: str
    description: str
    source: str
    expected: tuple[str, ...]
    inject: Callable[[CandidateRank, Site], None]
    needs: tuple[str, ...] = ()
    places: Callable[[CandidateRank], Sequence[Place]] = everywhere
    first_step: int = 1
    spare_steps: int = 0


@dataclass(frozen=True)
class Need:
    """A condition: in words, and as a test of a rank where that is possible before training."""

    words: str
    holds: Callable[[CandidateRank], bool] = lambda _candidate: True


def _policy(*names: str) -> Callable[[CandidateRank], bool]:
    return lambda candidate: candidate.engine.policy.name in names


def _ranks(number: int) -> Callable[[CandidateRank], bool]:
    return lambda candidate: candidate.engine.group.size >= number


def _any_module(test: Callable[[nn.Module], bool]) -> Callable[[CandidateRank], bool]:
    return lambda candidate: any(test(module) for module in candidate.engine.model.modules())


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout) and module.p > 0


def _normalises(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm)


def _has_ties(candidate: CandidateRank) -> bool:
    model = candidate.engine.model
    return len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))


def _is_adam(candidate: CandidateRank) -> bool:
    return candidate.state.optimizer.name in ("adam", "adamw")


def _kind(candidate: CandidateRank) -> str:
    return "" if candidate.context is None else candidate.context.kind


def _samples_of_each_rank(candidate: CandidateRank) -> int:
    geometry = candidate.batches.geometry
    return geometry.global_batch // geometry.num_microbatches // geometry.dp_size


NEEDS: Mapping[str, Need] = MappingProxyType(
    {
        "2 ranks": Need("2 ranks", _ranks(2)),
        "3 ranks": Need("3 ranks", _ranks(3)),
        "2 samples": Need("2 samples a rank and micro-step", lambda c: _samples_of_each_rank(c) >= 2),
        "micro-steps": Need("2 micro-steps", lambda c: c.num_microbatches >= 2),
        "ddp": Need("policy ddp", _policy("ddp")),
        "optimizer shards": Need("policy zero1, zero2 or zero3", _policy("zero1", "zero2", "zero3")),
        "gathered updates": Need("policy zero1 or zero2", _policy("zero1", "zero2")),
        "gradient shards": Need("policy zero2 or zero3", _policy("zero2", "zero3")),
        "whole gradients": Need("policy ddp or zero1", _policy("ddp", "zero1")),
        "weight shards": Need("policy zero3", _policy("zero3")),
        "whole weights": Need("policy ddp, zero1 or zero2", _policy("ddp", "zero1", "zero2")),
        "servers": Need("parameter servers", _policy("parameter_server")),
        "tensor parallelism": Need("plan.tp > 1", lambda c: c.engine.tensor_layout is not None),
        "cut tokens": Need(
            "plan.sequence_parallel",
            lambda c: c.engine.tensor_layout is not None and bool(c.engine.tensor_layout.partial),
        ),
        "repeated heads": Need(
            "fewer key/value heads than plan.tp",
            lambda c: c.engine.tensor_layout is not None and bool(c.engine.tensor_layout.repeated),
        ),
        "adam": Need("optimizer adam or adamw", _is_adam),
        "decoupled decay": Need("optimizer adamw", lambda c: c.state.optimizer.name == "adamw"),
        "clipping": Need("a limit of the gradient norm", lambda c: c.clip_norm is not None),
        "ties": Need("tied weights", _has_ties),
        "buffers": Need("a buffer of real numbers"),
        "frozen parameters": Need("a parameter that is not trained"),
        "dropout": Need("dropout", _any_module(_drops)),
        "no dropout": Need("no dropout", lambda c: not _any_module(_drops)(c)),
        "batch normalisation": Need("batch normalisation", _any_module(_normalises)),
        "modes differ": Need(
            "dropout or batch normalisation", _any_module(lambda m: _drops(m) or _normalises(m))
        ),
        "causal attention": Need("attention with a causal mask"),
        "sequences": Need("labels along a sequence"),
        "unequal labels": Need("unequal numbers of ignored labels, in a batch that is a dict"),
        "cut sequences": Need("plan.cp", lambda c: c.context is not None),
        "ring": Need("plan.cp_kind ring", lambda c: _kind(c) == "ring"),
        "zigzag": Need("plan.cp_kind ring or allgather", lambda c: _kind(c) in ("ring", "allgather")),
        "exchanged heads": Need("plan.cp_kind ulysses with even heads", lambda c: _kind(c) == "ulysses"),
        "padding": Need("sequences that cp does not divide"),
        "our batches": Need("a batch of tokens and labels"),
        "windows": Need("a sliding window"),
        "documents": Need("packed documents"),
        "stages": Need("plan.pp > 1", lambda c: c.executor is not None),
        "shared weights": Need("a weight that several stages use"),
        "skip connections": Need("values that go past a stage"),
        "several stages": Need(
            "two stages a rank",
            lambda c: (
                c.executor is not None and c.executor.schedule.num_stages > c.executor.schedule.num_ranks
            ),
        ),
        "split backward": Need(
            "a schedule that splits backward, under ddp or zero1",
            lambda c: c.executor is not None and c.executor.splits_backward,
        ),
        "layers that run again": Need("plan.recompute", lambda c: bool(c.again)),
        "rare parameters": Need("parameters that only some ranks' samples use"),
    }
)

# Places and ranks of all faults but those of servers are those of one copy of the model, cut by elements.
_LAYOUT = Need(
    "one copy of the model in flat shards",
    lambda c: (
        c.engine.policy.name == "ddp"
        or (c.engine.policy.ownership == "flat" and c.engine.groups.replicate.size == 1)
    ),
)


def draw_site(
    fault: SilentFault,
    candidate: CandidateRank,
    *,
    seed: int,
    steps: int,
    inert: frozenset[str] = frozenset(),
) -> Site:
    """A random site of `fault`: the same on every rank for the same seed.

    Args:
        fault: which.
        candidate: a rank before training.
        seed: of the draw.
        steps: how many steps are compared.
        inert: parameters that no gradient reaches, at which a fault changes nothing.

    Raises:
        ConfigError: E803 where plan or model do not meet the fault's needs.
    """
    _check_needs(fault, candidate, steps)
    found = fault.places(candidate)
    places = [place for place in found if not place.tensors or not inert.issuperset(place.tensors)]
    if not places:
        raise ConfigError(
            "E803",
            f"fault {fault.name!r} finds no place in {type(candidate.engine.model).__name__} under "
            f"{candidate.engine.policy.name}. It needs {_words(fault)}.",
        )
    draw = random.Random(f"{fault.name} {seed}")
    place = draw.choice(places)
    ranks = candidate.engine.group.ranks
    rank = draw.choice(place.ranks or ranks)
    return Site(
        rank=rank,
        other=draw.choice([other for other in ranks if other != rank] or [rank]),
        step=draw.randint(fault.first_step, steps - fault.spare_steps),
        microbatch=draw.randrange(candidate.num_microbatches),
        place=place,
    )


def _check_needs(fault: SilentFault, candidate: CandidateRank, steps: int) -> None:
    needs = [*(NEEDS[need] for need in fault.needs), *([] if "servers" in fault.needs else [_LAYOUT])]
    missing = [need.words for need in needs if not need.holds(candidate)]
    if steps < fault.first_step + fault.spare_steps:
        missing.append(f"{fault.first_step + fault.spare_steps} steps")
    if missing:
        engine = candidate.engine
        raise ConfigError(
            "E803",
            f"fault {fault.name!r} cannot be committed in {type(engine.model).__name__} under {engine.policy.name} on "
            f"{engine.group.size} ranks with {candidate.num_microbatches} micro-steps and {steps} steps: it needs "
            f"{' and '.join(missing)}.",
        )


def _words(fault: SilentFault) -> str:
    return " and ".join(NEEDS[need].words for need in fault.needs) or "another model"
