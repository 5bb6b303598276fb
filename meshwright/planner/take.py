"""A plan of plan.lock.json as what a run takes: compared with what the run says now, and refused where it is stale.

Owns what makes a file of plans stale: another model, other data, another cluster, other keys fixed, or a cost model
that says something else of the same layout than it did. That last is asked by pricing the plan again, so that no
version has to be counted up by hand. What runs have taught since does not make a file stale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.errors import PlanError
from meshwright.planner.compare import layout_from
from meshwright.planner.lock import cluster_of, fingerprints, read_lock
from meshwright.planner.request import Request
from meshwright.simulation.job import Cluster
from meshwright.simulation.prediction import predict

_SAME = 1e-6
_WORDS = {
    "model": "another model",
    "data": "another batch or sequence length",
    "cluster": "another cluster or headroom",
    "fixed": "other fixed keys",
}


@dataclass(frozen=True)
class Taken:
    """Attributes: the plan's number, from 1; its keys of `[plan]`; its entry of `plans`."""

    number: int
    keys: Mapping[str, object]
    predicted: Mapping[str, Any]


@dataclass(frozen=True)
class Offered:
    """Plans that a run is to take.

    Attributes:
        lock: what `lock_value` gave, perhaps read from a file.
        place: what they are called.
        fix: what to do where they cannot be taken.
    """

    lock: Mapping[str, object]
    place: str
    fix: str

    @property
    def cluster(self) -> Cluster:
        """That they were made for."""
        return cluster_of(self.lock)


def of_file(path: Path, *, again: str) -> Offered:
    """The plans of a file; `again` is the command that makes it anew.

    Raises:
        ConfigError: E289 where there is no such file.
    """
    return Offered(read_lock(path), str(path), f"Run `{again}` again, or leave {path.name} out")


def take(offered: Offered, request: Request) -> Taken:
    """The first plan that training runs.

    Args:
        offered: the plans.
        request: what the run asks now.

    Raises:
        PlanError: E293 where they are stale, E298 where training runs none of them.
    """
    lock, place, fix = offered.lock, offered.place, offered.fix
    stored, now = lock.get("fingerprint"), fingerprints(request)
    was = stored if isinstance(stored, Mapping) else {}
    changed = [word for name, word in _WORDS.items() if was.get(name) != now[name]]
    if changed:
        raise PlanError("E293", f"{place} is stale: it was made for {', '.join(changed)}. {fix}")
    found = first_runnable(offered)
    entry = found.predicted
    priced = predict(request.work, layout_from(entry), _as_then(request.cluster, lock))
    pairs = (
        (entry["step_seconds"], priced.step.total),
        (entry["memory_bytes"]["peak"], priced.memory.peak),
    )
    if not all(math.isclose(before, after, rel_tol=_SAME) for before, after in pairs):
        raise PlanError(
            "E293",
            f"{place} is stale: the cost model said {entry['step_seconds']:.4g} s of its plan {found.number}, and says "
            f"{priced.step.total:.4g} s now. {fix}",
        )
    return found


def first_runnable(offered: Offered) -> Taken:
    """The first plan that training runs, whatever it was made for; E298 where it runs none."""
    plans = offered.lock["plans"]
    assert isinstance(plans, list), "a lock file's plans are a list"
    for number, entry in enumerate(plans, start=1):
        if entry["trainable"]:
            return Taken(number, entry["keys"], entry)
    raise PlanError(
        "E298", f"{offered.place}: train runs none of its plans: {plans[0]['obstacle']}. {offered.fix}"
    )


def _as_then(cluster: Cluster, lock: Mapping[str, object]) -> Cluster:
    """The cluster with what runs had taught when the file was made."""
    then = cluster_of(lock).host
    if cluster.host is None or then is None:
        return cluster
    return replace(cluster, host=replace(cluster.host, learned=then.learned))
