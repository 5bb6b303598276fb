"""What to change next in a plan: one key at a time, each with the gain that the cost model predicts.

Owns which changes are tried and which are kept: those that training runs today, that fit, and that gain something.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.layout.plan import TrainPlan
from meshwright.planner.request import Request
from meshwright.planner.rules import refuse_layout, refuse_mesh
from meshwright.planner.runnable import plan_keys, why_not_trainable
from meshwright.planner.search import Wanted, search
from meshwright.simulation.job import Layout, with_changes
from meshwright.simulation.prediction import Prediction, predict

_STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
_SCHEDULES = ("1f1b", "zb-h1", "zb-h2", "zb-v")


@dataclass(frozen=True)
class Change:
    """One change.

    Attributes:
        keys: of `[plan]` with their new values, e.g. {"micro_batch": 4}; several where degrees change.
        gain: part of the step's time that is saved, from 0 to 1.
        predicted: the plan with the change.
    """

    keys: dict[str, object]
    gain: float
    predicted: Prediction


def layout_of_plan(plan: TrainPlan) -> Layout | None:
    """The priced form of a plan of training; None where it has something that no price knows."""
    words = str(plan.recompute)
    is_priced = plan.policy.name in _STAGES and words in ("none", "full") and not plan.stage_ranks
    if not is_priced or plan.precision not in ("bf16", "fp16") or plan.servers or plan.cp_kind == "2d":
        return None
    mesh = plan.mesh
    copies, cp = mesh.size("dp_replicate"), mesh.size("cp")
    return Layout(
        dp=mesh.dp,
        tp=mesh.size("tp"),
        pp=mesh.size("pp"),
        cp=cp,
        zero=_STAGES[plan.policy.name],
        shard=mesh.size("dp_shard") * cp if copies > 1 and plan.policy.name != "ddp" else 0,
        sequence_parallel=plan.sequence_parallel,
        schedule="1f1b" if mesh.size("pp") == 1 else plan.schedule,  # type: ignore[arg-type]
        chunks=plan.chunks if plan.schedule == "interleaved" else 1,
        recompute="full" if words == "full" else "none",
        micro_batch=plan.micro_batch,
        precision=plan.precision,
        cp_kind=plan.cp_kind,
    )


def best_changes(request: Request, own: Layout, *, count: int = 3, least: float = 0.01) -> list[Change]:
    """The changes that gain most, best first: of each key one, and the best plan of all.

    Args:
        request: the job, with nothing fixed.
        own: the plan as it is.
        count: changes at most.
        least: of the step's time; what gains less is left out.
    """
    now = predict(request.work, own, request.cluster)
    tried = [*_neighbours(own), *_best(request)]
    found: dict[tuple[str, ...], Change] = {}
    for layout in tried:
        keys = _changed(own, layout)
        if not keys or not _is_possible(request, layout):
            continue
        priced = predict(request.work, layout, request.cluster)
        change = Change(keys, 1 - priced.step.total / now.step.total, priced)
        names = tuple(keys)
        if change.gain >= least and (names not in found or change.gain > found[names].gain):
            found[names] = change
    return sorted(found.values(), key=lambda change: -change.gain)[:count]


def _neighbours(own: Layout) -> Iterator[Layout]:
    for micro in (own.micro_batch // 2, own.micro_batch * 2, own.micro_batch * 4):
        if micro:
            yield with_changes(own, micro_batch=micro)
    for recompute in ("none", "full"):
        yield with_changes(own, recompute=recompute)
    for zero in (0, 1, 2, 3):
        yield with_changes(own, zero=zero, shard=own.shard if zero else 0)
    if own.tp > 1:
        yield with_changes(own, sequence_parallel=not own.sequence_parallel)
    if own.pp > 1:
        for name in _SCHEDULES:
            yield with_changes(own, schedule=name, chunks=1)
        for chunks in (2, 4):
            yield with_changes(own, schedule="interleaved", chunks=chunks)


def _best(request: Request) -> Iterator[Layout]:
    best = search(request, Wanted(slack=1.0, num_meshes=1, ready=True)).ready
    if best is not None:
        yield best.layout


def _is_possible(request: Request, layout: Layout) -> bool:
    if refuse_mesh(request, layout) is not None or refuse_layout(request, layout) is not None:
        return False
    batch, micro = request.work.global_batch, layout.dp * layout.micro_batch
    if batch % micro or why_not_trainable(request.work, layout):
        return False
    return predict(request.work, layout, request.cluster).memory.peak <= request.usable_bytes


def _changed(own: Layout, other: Layout) -> dict[str, object]:
    """Keys of the other plan that differ, with what they are without: a key that is left out has its default."""
    before, after = plan_keys(own), plan_keys(other)
    defaults = plan_keys(Layout())
    plain = {
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "recompute": "none",
        "sequence_parallel": False,
        "chunks": 1,
        **defaults,
    }
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return {name: after.get(name, plain.get(name)) for name in names if name in after or name in plain}
