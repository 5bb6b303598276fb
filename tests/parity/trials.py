"""Random trials of verify: silent on 200 correct configurations, loud on 200 single elements off by 1e-8.

`python -m tests.parity.trials [seed]` runs what has not run on this commit, and writes its section of
docs/parity.md. Each trial is drawn from (seed, number) alone, so any of them can be run again.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from meshwright.launching.verify import result_of
from meshwright.testing.ranks import RankError
from meshwright.training.config import load_config
from meshwright.training.planning import plan_of
from meshwright.verification.cut import cut_overrides, eps_override
from meshwright.verification.job import RankReport, VerifyJob
from meshwright.verification.result import VerifyResult
from tests.parity import report
from tests.parity.sites import KINDS, Site, draw_site
from tests.parity.subjects import FAMILIES
from tests.parity.verifying import Prepared, Verifier

NUM_TRIALS = 200
SITES_OF_A_REFERENCE = 10
HEADING = "## Random trials of verify"
_NORMALISES = ("convolutions", "user's")
Row = dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """A random job, and what it is in words."""

    job: VerifyJob
    family: str
    words: str


def draw_job(draw: Random, *, family: str, precision: str | None = None) -> Drawn:
    """A random configuration of a family of models that is legal and correct."""
    functions, overrides = FAMILIES[family](draw)
    processes, micro, accumulate = draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 3)
    if processes * micro == 1 and family in _NORMALISES:
        micro = 2  # batch statistics need more than one sample
    optimizer = draw.choice(("adamw", "adamw", "adam", "sgd", "sgd momentum"))
    chosen = {
        "plan.zero": draw.randrange(4),
        "plan.processes": processes,
        "plan.micro_batch": micro,
        "plan.precision": precision or draw.choice(("fp64", "fp32")),
        "plan.bucket_bytes": draw.choice(("512 bytes", "4096 bytes", "1 MiB")),
        "train.global_batch": processes * micro * accumulate,
        "train.seed": draw.randrange(1000),
        "train.clip_norm": draw.choice((0.0, 0.05, 1.0)),
        "train.optimizer.name": optimizer.split()[0],
        "train.optimizer.momentum": 0.9 if "momentum" in optimizer else 0.0,
        "train.optimizer.lr": draw.choice((3e-4, 1e-2)),
        "train.optimizer.weight_decay": draw.choice((0.0, 0.1)),
    }
    overrides += [f"{name}={value}" for name, value in chosen.items()]
    config = load_config(None, overrides).config
    cut = [] if functions else cut_overrides(config, processes=processes)
    config = load_config(None, [*overrides, *cut, *eps_override(config)]).config
    plan = plan_of(config, world_size=processes)
    job = VerifyJob(config, plan, steps=draw.randint(1, 3), functions=functions)
    words = (
        f"{family} {overrides[0] if not functions else ''} {plan.describe()} {optimizer} steps {job.steps}"
    )
    return Drawn(job, family, " ".join(words.split()))


def correct_trial(verifier: Verifier, seed: int, number: int) -> Row:
    """One correct configuration through verify."""
    draw = Random(f"correct {seed} {number}")
    family = list(FAMILIES)[number % len(FAMILIES)]
    try:
        drawn, reference = prepare(verifier, lambda: draw_job(draw, family=family))
        result = verifier.run(reference)
        verifier.forget(reference)
    except RankError as error:
        return {"ok": False, "words": family, "family": family, "problem": str(error)}
    plan = drawn.job.plan
    return {
        "ok": result.ok,
        "words": drawn.words,
        "family": family,
        "policy": plan.policy.name,
        "ranks": plan.mesh.dp,
        "precision": plan.precision,
        "compared": sum(check.compared for check in result.checks),
        "problem": "" if result.ok else result.table(),
    }


def prepare(verifier: Verifier, draw: Callable[[], Drawn]) -> tuple[Drawn, Prepared]:
    """The first job drawn that has something to learn in every step: small batches may hold ignored labels only."""
    while True:
        drawn = draw()
        try:
            return drawn, verifier.prepare(drawn.job)
        except RankError as error:
            if "E601" not in str(error):
                raise RankError(f"{drawn.words}: {error}") from error


def sensitivity_trials(verifier: Verifier, seed: int, group: int) -> list[Row]:
    """Ten random sites of one random float64 configuration, each a run of its own."""
    draw = Random(f"sensitivity {seed} {group}")
    family = list(FAMILIES)[group % len(FAMILIES)]
    drawn, reference = prepare(verifier, lambda: draw_job(draw, family=family, precision="fp64"))
    rows = []
    for number in range(SITES_OF_A_REFERENCE):
        kind = KINDS[(number + group) % len(KINDS)]
        site = draw_site(reference.reference, kind, num_ranks=drawn.job.plan.mesh.dp, draw=draw)
        rows.append(_sensitivity_row(verifier, reference, drawn, site))
    verifier.forget(reference)
    return rows


def _sensitivity_row(verifier: Verifier, reference: Prepared, drawn: Drawn, site: Site) -> Row:
    reports = verifier.measure(reference, site.inject)
    result = result_of(drawn.job, reference.reference, reports, model="on warm ranks", seconds=0.0)
    problem = _not_named(result, site, holders=_holders(reports, site))
    item = site.item
    return {
        "ok": not problem,
        "words": f"{drawn.words}: {item.name} {item.step} {item.microbatch} rank {site.rank}",
        "family": drawn.family,
        "kind": item.check,
        "problem": f"{problem}\n{result.table()}" if problem else "",
    }


def _holders(reports: list[RankReport], site: Site) -> tuple[int, ...]:
    """Ranks whose piece has the element: where several have a copy, the one whose copy was changed."""
    if site.item.check == "activations":
        return (site.rank,)
    holders = {
        report.rank
        for report in reports
        for piece in report.stats
        if piece.key == site.item.key and piece.start <= site.element < piece.stop
    }
    return (site.rank,) if site.rank in holders and len(holders) > 1 else tuple(sorted(holders))


def _not_named(result: VerifyResult, site: Site, *, holders: tuple[int, ...]) -> str:
    """Empty where verify names the check, the tensor, its step and micro-step, and the rank; else what it missed."""
    if result.ok:
        return "not caught"
    found, item = result.first_wrong, site.item
    assert found is not None, "a failed result has a finding"
    named = (found.check, found.name, found.step, found.microbatch, found.ranks)
    wanted = (item.check, item.name, item.step, item.microbatch, holders)
    return "" if named == wanted else f"named {named} for {wanted}"


def main(seed: int = 0) -> int:
    """Run, report, and say by the exit status whether every trial went as it must."""
    commit = report.commit()
    work = report.ROOT / "parity-work" / f"trials-{commit}-{seed}.jsonl"
    work.parent.mkdir(exist_ok=True)
    if commit.endswith("-dirty"):  # another tree may have had this name
        work.unlink(missing_ok=True)
    done = [json.loads(line) for line in work.read_text().splitlines()] if work.exists() else []
    started = time.monotonic()
    with Verifier() as verifier:

        def correct(number: int) -> list[Row]:
            return [correct_trial(verifier, seed, number)]

        def sensitivity(group: int) -> list[Row]:
            return sensitivity_trials(verifier, seed, group)

        _run("correct", correct, NUM_TRIALS, done, work)
        _run("sensitivity", sensitivity, NUM_TRIALS // SITES_OF_A_REFERENCE, done, work)
    seconds = time.monotonic() - started
    report.write_section(section(done, commit=commit, seed=seed, seconds=seconds))
    failed = [row for row in done if not row["ok"]]
    print(
        f"{len(done) - len(failed)} of {len(done)} trials as they must be; {seconds:.0f} s; docs/parity.md written"
    )
    return 1 if failed else 0


def _run(name: str, trial: Callable[[int], list[Row]], count: int, done: list[Row], work: Path) -> None:
    """Trials 0..count-1 that are not in `done`, appended to it and to the file; what goes wrong is printed."""
    finished = {row["number"] for row in done if row["trial"] == name}
    for number in (number for number in range(count) if number not in finished):
        for row in trial(number):
            row |= {"trial": name, "number": number}
            done.append(row)
            with work.open("a") as file:
                print(json.dumps(row), file=file)
            if not row["ok"]:
                print(f"{name} {number}: {row['words']}\n{row['problem']}", flush=True)
        if number % 20 == 0:
            print(f"{name} {number + 1}/{count}", flush=True)


def section(rows: list[Row], *, commit: str, seed: int, seconds: float) -> str:
    """The section of docs/parity.md."""
    correct = [row for row in rows if row["trial"] == "correct"]
    sensitivity = [row for row in rows if row["trial"] == "sensitivity"]
    right = sum(row["ok"] for row in correct)
    named = sum(row["ok"] for row in sensitivity)
    compared = sum(row.get("compared", 0) for row in correct)
    lines = [
        HEADING,
        "",
        f"`python -m tests.parity.trials {seed}` on commit {commit}, {datetime.now(UTC):%Y-%m-%d}, {seconds:.0f} s.",
        "",
        f"- **{right} of {len(correct)} random correct configurations pass** ({compared:,} tensors, samples and counts",
        "  compared): " + _counts(correct, "policy", "ranks", "precision") + ".",
        f"- **{named} of {len(sensitivity)} single elements are found and named**: one element of a random gradient,",
        "  parameter or activation off by 1e-8 of its tensor's largest magnitude, at a random rank, step and",
        "  micro-step, in float64. Named means that the first finding has the right check, tensor, step, micro-step",
        "  and rank. Tensors that mathematics makes zero (the bias of keys) hold rounding only and are not drawn.",
        "",
        "| model | correct | pass | gradients named | parameters named | activations named |",
        "|---|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        mine = [row for row in correct if row["family"] == family]
        cells = [family, len(mine), sum(row["ok"] for row in mine)]
        for kind in KINDS:
            sites = [row for row in sensitivity if (row["family"], row["kind"]) == (family, kind)]
            cells.append(f"{sum(row['ok'] for row in sites)} of {len(sites)}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _counts(rows: list[Row], *keys: str) -> str:
    texts = []
    for key in keys:
        counts = sorted(Counter(str(row.get(key, "raised")) for row in rows).items())
        suffix = " ranks" if key == "ranks" else ""
        texts.append(", ".join(f"{value}{suffix} {count}" for value, count in counts))
    return "; ".join(texts)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
