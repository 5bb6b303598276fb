"""The answer to a question: plans in order, each with its price, why it stands there, and whether training runs it.

Owns the order that people see: first the fastest plan that training runs today, then the fastest of each other mesh;
so a plan that cannot run is marked and never first, unless none can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from meshwright.planner.fitting import OtherBatch, better_batch, nothing_found
from meshwright.planner.request import Request
from meshwright.planner.runnable import plan_keys, why_not_trainable
from meshwright.planner.search import Wanted, search
from meshwright.planner.standing import Priced, mesh_of
from meshwright.presets.known_errors import step_error
from meshwright.simulation.job import Layout
from meshwright.simulation.prediction import Prediction, predict

DEFAULT_COUNT = 5
_PARTS = ("compute", "bubble", "tensor", "context", "pipeline", "weights", "gradients", "optimizer")
_SAME = 0.002


@dataclass(frozen=True)
class Plan:
    """One way to carry the job out.

    Attributes:
        predicted: step time and memory with their parts.
        obstacle: why training does not run it today; empty where it does.
        why: in words, what sets it apart.
    """

    predicted: Prediction
    obstacle: str
    why: str

    @property
    def layout(self) -> Layout:
        """Its degrees and choices."""
        return self.predicted.layout

    def to_json(self) -> dict[str, object]:
        """As one entry of `plans`."""
        keys = plan_keys(self.layout)
        return {
            **self.predicted.to_json(),
            "trainable": not self.obstacle,
            "obstacle": self.obstacle,
            "why": self.why,
            "cp_kind": self.layout.cp_kind if self.layout.cp > 1 else None,
            "hsdp": self.layout.shard // self.layout.cp if self.layout.shard else None,
            "rank_order": rank_order(self.layout),
            "pipeline_inside": self.layout.pipeline_inside,
            "half_layers": self.layout.half_layers,
            "keys": keys,
        }


@dataclass(frozen=True)
class Plans:
    """All that a search says.

    Attributes:
        request: the question.
        plans: best first; see the module's docstring.
        front: no layout that fits has less time and less memory; fastest first, up to the search's slack.
        searched: layouts that were priced, refused or left out by a bound (a mesh or a group counts as one).
        priced: layouts that were priced.
        rejected: refused, by reason.
        bound: seconds that no layout that fits can beat.
        other_batch: one nearby that devices share better, if there is one.
        gap: how far the fastest plan of all may be above the best, as a part; 0: it is the best.
    """

    request: Request
    plans: tuple[Plan, ...]
    front: tuple[Priced, ...]
    searched: int
    priced: int
    rejected: Mapping[str, int]
    bound: float
    gap: float
    other_batch: OtherBatch | None = None

    @property
    def best(self) -> Plan:
        """The first."""
        return self.plans[0]

    def to_json(self) -> dict[str, object]:
        """The keys of `meshwright plan --json`."""
        known = step_error(self.request.cluster.machine.name)
        return {
            "plans": [plan.to_json() for plan in self.plans],
            "front": [
                {"keys": plan_keys(item.layout), "step_seconds": item.seconds, "peak_bytes": item.bytes}
                for item in self.front
            ],
            "searched": self.searched,
            "priced": self.priced,
            "rejected": dict(self.rejected),
            "bound_seconds": self.bound,
            "gap": self.gap,
            "step_time_error": None if known is None else asdict(known),
        }


def make_plans(request: Request, *, count: int = DEFAULT_COUNT) -> Plans:
    """Search, and order what was found.

    Args:
        request: the question.
        count: plans wanted at most.

    Raises:
        DoesNotFitError: E301 where no layout fits; it says what would.
        PlanError: E286 where none is legal.
    """
    found = search(request, Wanted(num_meshes=count, ready=True))
    if found.best is None:
        raise nothing_found(request, found)
    ordered = list(found.by_mesh)
    ready = found.ready
    if ready is not None and ready != ordered[0]:
        mesh = mesh_of(ready.layout)
        rest = [
            item
            for item in ordered
            if mesh_of(item.layout) != mesh or item.seconds < ready.seconds * (1 - _SAME)
        ]
        ordered = [ready, *rest]
    priced = [predict(request.work, item.layout, request.cluster) for item in ordered[:count]]
    first = priced[0]
    plans = tuple(
        Plan(
            item,
            why_not_trainable(request.work, item.layout),
            describe_first(item) if at == 0 else difference(first, item),
        )
        for at, item in enumerate(priced)
    )
    return Plans(
        request,
        plans,
        found.front,
        found.num_priced + found.num_bounded + sum(found.rejected.values()),
        found.num_priced,
        found.rejected,
        found.bound,
        found.gap,
        better_batch(request, found.best.seconds),
    )


def rank_order(layout: Layout) -> str:
    """Axes from the inside out, those of size 1 left out."""
    order = ("tp", "pp", "cp", "dp") if layout.pipeline_inside else ("tp", "cp", "dp", "pp")
    return ", ".join(axis for axis in order if getattr(layout, axis) > 1) or "one device"


def describe(layout: Layout) -> str:
    """Short text for people: `pp4 1f1b · tp8 · zero1x16 · micro 2`."""
    shares = layout.num_shards if layout.zero else layout.dp * layout.cp
    chunks = f" x {layout.chunks} chunks" if layout.chunks > 1 else ""
    halves = " of half layers" if layout.half_layers else ""
    words = [
        f"pp{layout.pp} {layout.schedule}{chunks}{halves}" if layout.pp > 1 else "",
        f"tp{layout.tp}" if layout.tp > 1 else "",
        f"cp{layout.cp} {layout.cp_kind}" if layout.cp > 1 else "",
        (f"zero{layout.zero}x{shares}" if layout.zero else f"dp{layout.dp}")
        if layout.dp * layout.cp > 1
        else "",
        f"micro {layout.micro_batch}",
        f"recompute {layout.recompute}" if layout.recompute != "none" else "",
        "pp inside dp" if layout.pipeline_inside else "",
    ]
    return " · ".join(word for word in words if word)


def describe_first(item: Prediction) -> str:
    """Where its time goes."""
    step = item.step
    parts = sorted(((getattr(step, name), name) for name in _PARTS), reverse=True)
    return " · ".join(
        f"{name} {100 * seconds / step.total:.0f} %"
        for seconds, name in parts
        if seconds > 0.005 * step.total
    )


def difference(first: Prediction, other: Prediction) -> str:
    """What `other` gains and loses against `first`, largest first."""
    one, two = first.step, other.step
    changes = [(getattr(two, name) - getattr(one, name), name) for name in _PARTS]
    shown = [
        f"{name} {change:+.3g} s"
        for change, name in sorted(changes, key=lambda pair: -abs(pair[0]))
        if abs(change) > _SAME * one.total
    ]
    total = f"{100 * (two.total / one.total - 1):+.1f} %"
    memory = f"memory {(other.memory.peak - first.memory.peak) / 2**30:+.1f} GiB"
    return f"{total}: {', '.join(shown[:4]) or 'the same parts'}; {memory}"
