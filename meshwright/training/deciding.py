"""`plan.mode = "auto"`: from what the units of a model cost to the keys of `[plan]` that are left open.

Owns the question to `partitioning/` (devices, what the user fixed, memory by the policy and the optimizer) and the
answer as keys with reasons. Without torch: the launcher decides once, before it starts any rank.
Simplifications: under tp and cp, units take their part of the time; messages do not overlap with work.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from meshwright.errors import DoesNotFitError, MeshwrightError, PlanError
from meshwright.layout.accounting import OPTIMIZER_SLOTS
from meshwright.partitioning.partition import Stage
from meshwright.partitioning.scheduled import Given, search_schedule
from meshwright.partitioning.search import Searched, Split, search
from meshwright.partitioning.stage_costs import Group, Problem
from meshwright.partitioning.unit_costs import UnitCosts
from meshwright.planner.asking import part_of
from meshwright.planner.request import DEFAULT_HEADROOM
from meshwright.training.config import RunConfig
from meshwright.training.measured import Measured
from meshwright.training.sections import PlanConfig, momentum_of

# Sizes of a micro-batch that are measured; others lie on lines between them.
_MOST_SIZES = 4
# Of gradients and optimizer state, by plan.zero: what a device has of a byte of weights, whole and cut over dp.
_WEIGHTS, _GRADIENTS = 1.0, 1.0
# What the policy moves in each micro-batch: gradients are reduced as they come, weights gathered before each use.
_MOVED = MappingProxyType({0: (0.0, 0.0, 2.0), 1: (0.0, 0.0, 2.0), 2: (0.0, 1.0, 1.0), 3: (1.0, 2.0, 0.0)})
_MIB = 1 << 20
# By so much a plan whose stages have unlike numbers of replicas must be faster than one whose have not.
_WORTH = 0.05


@dataclass(frozen=True)
class Decision:
    """What was decided.

    Attributes:
        keys: of `[plan]`, without those that the user fixed.
        reasons: of each key.
        lines: for people.
        step_seconds: expected; None: not known.
        memory_bytes: expected, of a device of each stage.
    """

    keys: Mapping[str, object]
    reasons: Mapping[str, str]
    lines: tuple[str, ...]
    step_seconds: float | None
    memory_bytes: tuple[float, ...]


def fixed_keys(plan: PlanConfig) -> Mapping[str, object]:
    """Keys that the user gave, with their values."""
    given = {key: getattr(plan, key) for key in plan.model_fields_set}
    return MappingProxyType({key: value for key, value in given.items() if value is not None})


def sizes_to_measure(config: RunConfig, world_size: int) -> tuple[int, ...]:
    """Samples of a micro-batch on one rank that a plan may have; at most a few, the least and the most among them."""
    fixed, batch = fixed_keys(config.plan), config.train.global_batch
    if config.plan.micro_batch is not None:
        return (config.plan.micro_batch,)
    devices = _num_devices(config.plan, world_size)
    found = set()
    for replicas in _divisors(devices):
        if batch % replicas == 0 and replicas == fixed.get("dp", replicas):
            found |= {batch // replicas // count for count in _counts(batch // replicas, devices)}
    ordered = sorted(found) or [1]
    if len(ordered) <= _MOST_SIZES:
        return tuple(ordered)
    steps = [round(i * (len(ordered) - 1) / (_MOST_SIZES - 1)) for i in range(_MOST_SIZES)]
    return tuple(ordered[i] for i in steps)


def decide(config: RunConfig, measured: Measured, *, world_size: int) -> Decision:
    """The plan of the least expected step within memory, with what the user fixed.

    A model that cannot be cut is trained whole on every rank (W272).

    Args:
        config: of the run.
        measured: of its model.
        world_size: number of processes.

    Raises:
        DoesNotFitError: E277 where no plan fits; it says what lacks.
        PlanError: E278 where what is fixed leaves no plan; E279 where stages are asked of a model that cannot be cut.
    """
    fixed, costs = fixed_keys(config.plan), measured.costs
    if costs is None:
        return _whole(config, measured.why_not, world_size)
    limit = math.inf if measured.usable is None else measured.usable * _part_used(config.plan)
    levels = [config.plan.zero] if "zero" in fixed else [0, 1, 3]
    failure: DoesNotFitError | None = None
    for level in levels:
        try:
            found = _search(config, costs, world_size, limit, level)
        except DoesNotFitError as error:
            failure = failure or error
            continue
        return _answer(config, costs, found, level)
    assert failure is not None, "some level was tried"
    raise _does_not_fit(config, failure, world_size) from failure


def _part_used(plan: PlanConfig) -> float:
    """Of the memory that ranks may use by default: more or less of it, as `plan.memory_headroom` says."""
    return (
        1.0 if plan.memory_headroom is None else (1 - part_of(plan.memory_headroom)) / (1 - DEFAULT_HEADROOM)
    )


def _whole(config: RunConfig, why_not: str, world_size: int) -> Decision:
    """Of a model that cannot be cut: replicas only."""
    if config.plan.pp > 1:
        raise PlanError(
            "E279",
            f'plan.pp = {config.plan.pp} with plan.mode = "auto": the model cannot be cut into stages. {why_not} Leave '
            f"plan.pp out: every rank then has the whole model.",
        )
    dp = _num_devices(config.plan, world_size)
    keys = {"pp": 1, "dp": dp}
    open_keys = {key: value for key, value in keys.items() if key not in fixed_keys(config.plan)}
    text = f"W272 the model cannot be cut into stages, so all {dp} data ranks have it whole: {why_not}"
    return Decision(open_keys, dict.fromkeys(open_keys, "W272"), (text,), None, ())


def _search(config: RunConfig, costs: UnitCosts, world_size: int, limit: float, level: int) -> Searched:
    plan, batch = config.plan, config.train.global_batch
    fixed, devices = fixed_keys(plan), _num_devices(plan, world_size)
    least, most = 1, min(devices, len(costs.units))
    if "pp" in fixed:
        least = most = plan.pp
    if "dp" in fixed:
        least, most = max(least, devices // (plan.dp or 1)), min(most, devices // (plan.dp or 1))
    if plan.stages:
        least = most = len(plan.stages) + 1
    resident, sharded = _states(config, level)
    part = plan.tp * plan.cp
    problem = Problem(
        {},
        (Group(devices, part, limit, costs.bytes_per_second or math.inf, costs.message_seconds),),
        (least, most),
        resident=resident / plan.tp,
        sharded=sharded / plan.tp,
        moved=_MOVED[level],
        gradient_bandwidth=costs.gradient_bytes_per_second or None,
        update_seconds=costs.update_seconds_per_byte / plan.tp,
        forbidden=_forbidden(plan, costs),
        recompute=plan.recompute != "none",
    )
    asked = sizes_to_measure(config, world_size)[0]
    ask = partial(
        search
        if _is_priced(plan)
        else partial(search_schedule, given=Given(plan.schedule or "", plan.chunks)),
        lambda samples: costs.chain(samples, states=resident + sharded),
        batch=batch,
        num_microbatches=_microbatches(config, costs, devices),
        least_samples=1 if costs.samples[0] == asked else costs.samples[0],
    )
    found: list[Searched] = []
    failures: list[MeshwrightError] = []
    for split, given in _questions(plan, costs, problem):
        try:
            found.append(ask(given, **({"split": split} if _is_priced(plan) else {})))
        except (DoesNotFitError, PlanError) as error:
            failures.append(error)
    if not found:
        lacking = next((error for error in failures if isinstance(error, DoesNotFitError)), None)
        raise lacking or _nothing_left(config, devices, failures[0])
    # Unlike numbers of replicas must be worth it: what they gain is expected, not measured.
    return min(found, key=lambda item: item.step_seconds * (1 if _is_even(item) else 1 + _WORTH))


def _questions(plan: PlanConfig, costs: UnitCosts, problem: Problem) -> Iterator[tuple[Split, Problem]]:
    """All stages with as many replicas, and where it can be, each with its own number."""
    yield "equal", problem
    least, most = max(2, problem.stages[0]), problem.stages[1]
    fixed = fixed_keys(plan).keys() & {"dp", "hsdp", "micro_batch", "tp", "cp", "schedule", "chunks"}
    if not fixed and least <= most and problem.num_devices > least:
        forbidden = problem.forbidden | costs.indivisible
        yield "even", dataclasses.replace(problem, stages=(least, most), forbidden=forbidden)


def _is_priced(plan: PlanConfig) -> bool:
    """Whether the search's own formula is that of the schedule; others are run event by event."""
    return plan.schedule in (None, "1f1b") and plan.chunks in (None, 1)


def _is_even(found: Searched) -> bool:
    return len({stage.devices for stage in found.partition.stages}) == 1


def _microbatches(config: RunConfig, costs: UnitCosts, devices: int) -> tuple[int, ...]:
    """Numbers of micro-batches to try: of the user's size with each number of replicas, or all that are sensible.

    A model with batch statistics computes something else with another number: unless stages are asked for, it stays 1.
    """
    batch, micro = config.train.global_batch, config.plan.micro_batch
    if micro is None and costs.has_batch_statistics and config.plan.pp == 1:
        return (1,)
    if micro is None:
        return tuple(_counts(batch, devices))
    counts = {
        batch // (micro * replicas) for replicas in _divisors(devices) if batch % (micro * replicas) == 0
    }
    if not counts:
        raise PlanError(
            "E278",
            f"train.global_batch = {batch} is no multiple of plan.micro_batch = {micro}: no plan has such "
            f"micro-batches. Leave plan.micro_batch out, or set it to a divisor.",
        )
    return tuple(sorted(counts))


def _forbidden(plan: PlanConfig, costs: UnitCosts) -> frozenset[int]:
    """With stages that the user named, every other cut."""
    if not plan.stages:
        return frozenset()
    places = {unit.name: number for number, unit in enumerate(costs.units)}
    wanted = {places.get(name) for name in plan.stages}
    unknown = [name for name in plan.stages if name not in places]
    if unknown:
        raise PlanError(
            "E278",
            f'plan.stages: no stage of {costs.model} can begin at {unknown[0]!r} with plan.mode="auto", which cuts at '
            f"{', '.join(list(places)[1:9])} ... Leave plan.stages out, or name one of these.",
        )
    return frozenset(number for number in range(1, len(costs.units)) if number not in wanted)


def _states(config: RunConfig, level: int) -> tuple[float, float]:
    """Bytes of state a byte of weights: what every replica has, and what is cut over them."""
    chosen = config.train.optimizer
    name = "sgd momentum" if chosen.name == "sgd" and momentum_of(chosen) else chosen.name
    slots = float(OPTIMIZER_SLOTS["adamw" if name == "muon" else name][0])
    copy = 0.5 if config.plan.precision in ("bf16", "fp16") else 0.0
    parts = {
        0: (_WEIGHTS + _GRADIENTS + slots, 0.0),
        1: (_WEIGHTS + _GRADIENTS, slots),
        2: (_WEIGHTS, _GRADIENTS + slots),
        3: (0.0, _WEIGHTS + _GRADIENTS + slots),
    }
    resident, sharded = parts[level]
    return (resident, sharded + copy) if level == 3 else (resident + copy, sharded)


def _answer(config: RunConfig, costs: UnitCosts, found: Searched, level: int) -> Decision:
    stages, fixed = found.partition.stages, fixed_keys(config.plan)
    pp, dp = _num_places(config.plan, found), max(stage.devices for stage in stages)
    micro = config.train.global_batch // (dp * found.partition.num_microbatches)
    firsts = [stage.first for stage in stages]
    why = f"least of {found.num_tried} numbers of micro-batches with all stages and replicas, gap {found.gap:.1%}"
    keys: dict[str, object] = {"pp": pp, "dp": dp, "micro_batch": micro, "zero": level}
    reasons = {
        "pp": why,
        "dp": "replicas of each stage" if _is_even(found) else "replicas of the stage with the most",
        "micro_batch": f"{found.partition.num_microbatches} micro-batches a step",
        "zero": "fits without" if not level else "the first that fits in memory",
    }
    if pp > 1:
        keys |= {"schedule": "1f1b", "stages": costs.starts(firsts[1:])}
        reasons |= {
            "schedule": "the one that the search prices",
            "stages": f"longest stage {1 + found.partition.imbalance:.3f} x the mean",
        }
    if not _is_even(found):
        ends = list(itertools.accumulate(stage.devices for stage in stages))
        keys["stage_ranks"] = tuple(
            tuple(range(end - stage.devices, end)) for end, stage in zip(ends, stages, strict=True)
        )
        reasons["stage_ranks"] = f"{_WORTH:.0%} faster than equal numbers of replicas, or nothing else fits"
    open_keys = {key: value for key, value in keys.items() if key not in fixed}
    return Decision(
        open_keys,
        {key: reasons[key] for key in open_keys},
        tuple(_lines(config.plan, costs, found)),
        found.step_seconds,
        tuple(stage.memory_bytes for stage in stages),
    )


def _num_places(plan: PlanConfig, found: Searched) -> int:
    """Places of the pipeline, each of which may hold several stages."""
    chunks = (
        1 if _is_priced(plan) else plan.chunks or {"interleaved": 2, "zb-v": 2}.get(plan.schedule or "", 1)
    )
    return len(found.partition.stages) // chunks


def _lines(plan: PlanConfig, costs: UnitCosts, found: Searched) -> Iterator[str]:
    """The plan as people read it."""
    stages = found.partition.stages
    kept = sorted(fixed_keys(plan).keys() - {"mode", "processes"})
    replicas = str(stages[0].devices) if _is_even(found) else "+".join(str(stage.devices) for stage in stages)
    with_fixed = f"; kept as given: {', '.join(kept)}" if kept else ""
    yield (
        f"auto   {costs.model}: {len(costs.units)} units → pp {_num_places(plan, found)} x dp {replicas}, "
        f"{found.partition.num_microbatches} micro-batches, expected {found.step_seconds:.3f} s a step, "
        f"gap {found.gap:.1%}{with_fixed}"
    )
    for number, stage in enumerate(stages):
        yield f"       stage {number}  {_stage_text(costs, stage)}"


def _stage_text(costs: UnitCosts, stage: Stage) -> str:
    first, last = costs.units[stage.first].name or "the start", costs.units[stage.last].name or "the start"
    names = first if first == last else f"{first} .. {last}"
    return (
        f"{names}   {1e3 * stage.forward_seconds:.2f} + {1e3 * stage.backward_seconds:.2f} ms a micro-batch   "
        f"{stage.memory_bytes / _MIB:,.1f} MiB"
    )


def _does_not_fit(config: RunConfig, failure: DoesNotFitError, world_size: int) -> DoesNotFitError:
    fixed = sorted(fixed_keys(config.plan).keys() - {"mode", "processes"})
    kept = f" with {', '.join(f'plan.{key}' for key in fixed)} as given" if fixed else ""
    advice = 'more processes, plan.recompute="full", or a smaller train.global_batch'
    return DoesNotFitError(
        "E277",
        f'plan.mode = "auto" finds no plan on {world_size} processes{kept} that fits in memory: '
        f"{failure.message.split('Give that')[0].strip()} Also tried: plan.zero up to 3. Give it {advice}.",
    )


def _nothing_left(config: RunConfig, devices: int, error: MeshwrightError) -> PlanError:
    fixed = fixed_keys(config.plan)
    kept = " ".join(f"plan.{key}={fixed[key]}" for key in sorted(fixed.keys() - {"mode"}))
    return PlanError(
        "E278",
        f'plan.mode = "auto" with {kept or "nothing fixed"} leaves no plan on {devices} pipeline and data ranks: '
        f"{error.message}. Leave one of these keys out.",
    )


def _num_devices(plan: PlanConfig, world_size: int) -> int:
    shared = plan.tp * plan.cp
    if plan.sync == "parameter_server":
        raise PlanError(
            "E278",
            'plan.mode = "auto" plans ranks that all run the model, and plan.sync = "parameter_server" has others. '
            "Leave one of the two out.",
        )
    if world_size % shared:
        raise PlanError(
            "E278",
            f'plan.mode = "auto": plan.tp x plan.cp = {shared} does not divide {world_size} processes; change one '
            f"of them",
        )
    return world_size // shared


def _counts(batch: int, devices: int) -> list[int]:
    return [count for count in _divisors(batch) if count <= 4 * devices]


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def decided(config: RunConfig, decision: Decision) -> RunConfig:
    """The configuration with what was decided; its mode is `given` from here on."""
    plan = config.plan.model_copy(update={**decision.keys, "mode": "given"})
    return config.model_copy(update={"plan": plan})
