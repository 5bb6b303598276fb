"""Questions about plans that were made: "why not pp=4" and "1 vs 3", answered from plan.lock.json.

Owns the two questions and their answers as text and data. A "why not" searches again with that fixed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.planner.fitting import reasons_of
from meshwright.planner.lock import cluster_of, work_of
from meshwright.planner.plans import describe, difference
from meshwright.planner.request import Request, make_request
from meshwright.planner.runnable import why_not_trainable
from meshwright.planner.search import BEST_ONLY, search
from meshwright.simulation.job import Layout
from meshwright.simulation.prediction import Prediction, predict
from meshwright.simulation.reading import layout_of, plan_values

_GIB = 2**30


@dataclass(frozen=True)
class Answer:
    """Attributes: the question; lines of text; the two plans where there are two, for figures."""

    question: str
    lines: tuple[str, ...]
    first: Prediction | None = None
    other: Prediction | None = None

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__  # what is asked at a prompt is answered there

    def to_json(self) -> dict[str, object]:
        """For `--json`."""
        plans = [plan.to_json() for plan in (self.first, self.other) if plan is not None]
        return {"question": self.question, "answer": " ".join(self.lines), "plans": plans}


def is_question(text: str) -> bool:
    """Whether `text` asks about plans."""
    return bool(re.match(r"\s*(why not\b|\d+\s*vs\.?\s*\d+\s*$)", text, re.IGNORECASE))


def answer(text: str, lock: Mapping[str, object]) -> Answer:
    """Answer one question.

    Args:
        text: "why not pp=4,tp=2" or "1 vs 3".
        lock: what `read_lock` gave.

    Raises:
        ConfigError: E288 for a plan number or keys that there are not.
    """
    return answer_about(text, *_read(lock))


def _read(lock: Mapping[str, object]) -> tuple[Request, list[Prediction]]:
    """The question of a file, and its plans as they are priced now."""
    request = make_request(
        work_of(lock), cluster_of(lock), _table(lock["fixed"]), headroom=float(str(lock["headroom"]))
    )
    return request, [_priced(request, entry) for entry in _entries(lock)]


def _entries(lock: Mapping[str, object]) -> list[dict[str, object]]:
    entries = lock["plans"]
    assert isinstance(entries, list), "a lock file's plans are a list"
    return [_table(entry) for entry in entries]


def answer_about(text: str, request: Request, plans: Sequence[Prediction]) -> Answer:
    """As `answer`, of plans that are no file.

    Args:
        text: the question.
        request: what the plans were searched for.
        plans: best first.
    """
    match = re.fullmatch(r"\s*(\d+)\s*vs\.?\s*(\d+)\s*", text, re.IGNORECASE)
    if match:
        return _versus(text, request, plans, (int(match[1]), int(match[2])))
    return _why_not(text, request, plans[0])


def decision(lock: Mapping[str, object]) -> tuple[str, ...]:
    """What a file of plans decided: the question, its plans with what sets them apart, what was refused."""
    request, plans = _read(lock)
    work, where = request.work, request.cluster
    fixed = ", ".join(f"{key}={value}" for key, value in request.fixed.items())
    refused = sorted(_table(lock["rejected"]).items(), key=lambda pair: -int(str(pair[1])))
    rows = zip(plans, _entries(lock), strict=True)
    return (
        f"{work.model.name}, {work.global_batch:,} sequences of {work.seq_len:,} tokens a step, on "
        f"{where.num_devices:,} x {where.machine.name}" + (f", fixed {fixed}" if fixed else ""),
        *(
            f"{number}{'' if entry['trainable'] else '*'}  {describe(item.layout)}: {item.step.total:.3g} s, "
            f"{item.memory.peak / _GIB:.1f} GiB   {entry['why']}"
            for number, (item, entry) in enumerate(rows, start=1)
        ),
        "refused: " + (" · ".join(f"{count} {reason}" for reason, count in refused) or "nothing"),
    )


def _table(value: object) -> dict[str, object]:
    assert isinstance(value, dict), "a table of a lock file"
    return value


def _priced(request: Request, entry: Mapping[str, object]) -> Prediction:
    return predict(request.work, layout_from(entry), request.cluster)


def layout_from(entry: Mapping[str, object]) -> Layout:
    """The layout of one entry of `plans`."""
    keys = _table(entry["keys"])
    layout = layout_of(keys)
    hsdp = keys.get("hsdp", 0)
    assert isinstance(hsdp, int), "a number of ranks"
    return replace(
        layout,
        shard=hsdp * layout.cp,
        pipeline_inside=bool(entry["pipeline_inside"]),
        half_layers=bool(entry["half_layers"]),
    )


def _versus(text: str, request: Request, plans: Sequence[Prediction], numbers: tuple[int, int]) -> Answer:
    for number in numbers:
        if not 1 <= number <= len(plans):
            raise ConfigError(
                "E288", f'plan {number}: there are plans 1 to {len(plans)}; write e.g. "1 vs 2"'
            )
    first, other = (plans[number - 1] for number in numbers)
    return Answer(text, _both(request, numbers, first, other), first, other)


def _both(
    request: Request, names: tuple[object, object], first: Prediction, other: Prediction
) -> tuple[str, ...]:
    rows = [
        f"{name}: {describe(item.layout)}: {item.step.total:.3g} s, {item.memory.peak / _GIB:.1f} GiB"
        for name, item in zip(names, (first, other), strict=True)
    ]
    obstacles = [
        f"{name} does not run in train today: {obstacle}."
        for name, item in zip(names, (first, other), strict=True)
        if (obstacle := why_not_trainable(request.work, item.layout))
    ]
    return (*rows, f"{names[1]} against {names[0]}: {difference(first, other)}", *obstacles)


def _why_not(text: str, request: Request, first: Prediction) -> Answer:
    asked = re.sub(r"^\s*why not\s*", "", text, flags=re.IGNORECASE).strip().rstrip("?")
    values = plan_values(asked)
    if not values or "" in values.values():
        raise ConfigError(
            "E288", f'{text!r}: write what should be fixed, e.g. "why not pp=4" or "why not tp=2,zero=3"'
        )
    try:
        other = make_request(
            request.work, request.cluster, {**request.fixed, **values}, headroom=request.headroom
        )
    except MeshwrightError as error:
        return Answer(text, (f"{asked} is not possible: {error.message}",))
    found = search(other, BEST_ONLY)
    if found.best is None:
        reasons = reasons_of(other, found.rejected)
        text_lines = [f"no layout with {asked} is left:", *(f"  {reason}" for reason in reasons)]
        if found.smallest is not None:
            need, usable = found.smallest.bytes / _GIB, request.usable_bytes / _GIB
            text_lines.append(f"  the smallest needs {need:.1f} of {usable:.1f} GiB usable")
        return Answer(text, tuple(text_lines))
    best = predict(request.work, found.best.layout, request.cluster)
    if best.step.total < first.step.total:
        lines = _both(request, ("the first plan", f"the best with {asked}"), first, best)
        return Answer(text, ("it is faster, but see below", *lines), first, best)
    return Answer(
        text, _both(request, ("the first plan", f"the best with {asked}"), first, best), first, best
    )
