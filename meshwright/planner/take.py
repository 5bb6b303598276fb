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
    predicted: Mapping[str, object]


def lock_cluster(path: Path) -> Cluster:
    """The cluster of a file of plans, for a run that names none.

    Raises:
        ConfigError: E289.
    """
    return cluster_of(read_lock(path))


def take(path: Path, request: Request, *, again: str) -> Taken:
    """The first plan that training runs.

    Args:
        path: the file.
        request: what the run asks now.
        again: the command that makes the file anew, for the text.

    Raises:
        ConfigError: E289 where there is no such file.
        PlanError: E293 where it is stale, E298 where training runs none of its plans.
    """
    fix = f"Run `{again}` again, or leave {path.name} out"
    return take_from(read_lock(path), request, place=str(path), fix=fix)


def take_from(lock: Mapping[str, object], request: Request, *, place: str, fix: str) -> Taken:
    """As `take`, of plans that are no file.

    Args:
        lock: what `lock_value` gave.
        request: what the run asks now.
        place: what the plans are called in the text of an error.
        fix: what to do, for the same.
    """
    stored, now = lock.get("fingerprint"), fingerprints(request)
    was = stored if isinstance(stored, Mapping) else {}
    changed = [word for name, word in _WORDS.items() if was.get(name) != now[name]]
    if changed:
        raise PlanError("E293", f"{place} is stale: it was made for {', '.join(changed)}. {fix}")
    plans = lock["plans"]
    assert isinstance(plans, list), "a lock file's plans are a list"
    runs = [number for number, entry in enumerate(plans, start=1) if entry["trainable"]]
    if not runs:
        raise PlanError("E298", f"{place}: train runs none of its plans: {plans[0]['obstacle']}. {fix}")
    entry = plans[runs[0] - 1]
    priced = predict(request.work, layout_from(entry), _as_then(request.cluster, lock))
    pairs = (
        (entry["step_seconds"], priced.step.total),
        (entry["memory_bytes"]["peak"], priced.memory.peak),
    )
    if not all(math.isclose(before, after, rel_tol=_SAME) for before, after in pairs):
        raise PlanError(
            "E293",
            f"{place} is stale: the cost model said {entry['step_seconds']:.4g} s of its plan {runs[0]}, and says "
            f"{priced.step.total:.4g} s now. {fix}",
        )
    return Taken(runs[0], entry["keys"], entry)


def _as_then(cluster: Cluster, lock: Mapping[str, object]) -> Cluster:
    """The cluster with what runs had taught when the file was made."""
    then = cluster_of(lock).host
    if cluster.host is None or then is None:
        return cluster
    return replace(cluster, host=replace(cluster.host, learned=then.learned))
