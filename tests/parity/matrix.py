"""`make parity`: the full product of the parity cases, resumable; the table goes to docs/parity.md.

Cases that passed on this commit are kept in `parity-work/` and not run again. A case that fails is printed and the run
goes on; the exit status tells.
"""

from __future__ import annotations

import itertools
import json
import sys
import time

from meshwright.testing.ranks import RankError, RankPool
from tests.parity import report
from tests.parity.harness import Case, candidate, compare, reference
from tests.parity.test_data_parallel import FACTORS


def main() -> int:
    commit = report.commit()
    work = report.ROOT / "parity-work" / f"{commit}.jsonl"
    work.parent.mkdir(exist_ok=True)
    done = {}
    if work.exists():
        done = {row["case"]: row for row in map(json.loads, work.read_text().splitlines())}
    cases = [Case(*values) for values in itertools.product(*FACTORS.values())]
    pool, started, failures = RankPool(), time.monotonic(), 0
    for number, case in enumerate(cases):
        if str(case) in done:
            continue
        row = run_case(pool, case)
        failures += not row["ok"]
        if row["ok"]:
            done[str(case)] = row
            with work.open("a") as file:
                print(json.dumps(row), file=file)
        if not row["ok"] or number % 50 == 0:
            print(f"{number + 1}/{len(cases)} {time.monotonic() - started:.0f} s {row}", flush=True)
    pool.close()
    report.write_section(table(commit, cases, done))
    print(f"{len(done)} of {len(cases)} cases equal one process; docs/parity.md written")
    return 1 if failures else 0


def run_case(pool: RankPool, case: Case) -> dict[str, object]:
    try:
        result = compare(case, pool.run(candidate, case.world, case), reference(case))
    except (AssertionError, RankError) as error:
        return {"case": str(case), "ok": False, "error": str(error)[-2000:]}
    return {"case": str(case), "ok": True, **vars(result)}


def table(commit: str, cases: list[Case], done: dict[str, dict[str, object]]) -> str:
    lines = [
        "# Parity with one process",
        "",
        f"`make parity` on commit {commit}: {len(done)} of {len(cases)} cases pass. Every case: 5 clipped steps,",
        "global batch 12, unequal valid tokens per rank; loss, norm, every gradient and every parameter compared.",
        "Bounds: float64 1e-12, float32 1e-5, relative to the larger of the tensor's and its module's norm.",
        "",
        "| model | policy | element type | cases | numbers compared | judged by the module's norm | worst | where |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, policy, dtype in itertools.product(FACTORS["model"], FACTORS["policy"], FACTORS["dtype"]):
        group = [c for c in cases if (c.model, c.policy, c.dtype) == (model, policy, dtype)]
        rows = [done[str(c)] for c in group if str(c) in done]
        if rows:
            worst = max(rows, key=lambda row: row["worst"])
            compared, absolute = (sum(int(r[k]) for r in rows) for k in ("compared", "judged_absolutely"))
            lines.append(
                f"| {model} | {policy} | {dtype} | {len(rows)} of {len(group)} | {compared:,} | {absolute:,} | "
                f"{worst['worst']:.1e} | {worst['worst_tensor']} |"
            )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
