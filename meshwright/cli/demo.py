"""`meshwright demo`: the first five minutes. A plan is priced, and a language model learns by it from real text on two
local processes; what was predicted is compared with what was measured.

Then a cut of it is compared with one process, and a page tells of all. Owns the demo's run and its lines. Offline, with
fixed steps and a fixed plan, so that a second run prints the same digits.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.machine import Machine, inspect_machine
from meshwright.cli.output import print_json, stdout_to_stderr
from meshwright.cli.train import require_torch
from meshwright.cli.verify import keep_result
from meshwright.errors import EXIT_VERIFY_FAILED
from meshwright.reporting.page import write_report
from meshwright.reporting.reading import read_run

if TYPE_CHECKING:
    from meshwright.verification.result import VerifyResult

DEMO: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "model": {"source": "preset:gpt-nano"},
        "data": {"train": "stdlib", "seq_len": 128},
        "train": {
            "global_batch": 32,
            "stop_at": "120 steps",
            "seed": 1,
            "deterministic": True,
            "optimizer": {"name": "adamw", "lr": 3e-3},
            "schedule": {"name": "cosine", "warmup": "20 steps"},
            "eval_every": "end",
            "eval_samples": 256,
        },
        "plan": {"mode": "auto", "processes": 2, "dp": 2, "zero": 1, "micro_batch": 16, "recompute": "none"},
        "save": {"dir": "runs/demo"},
        "log": {"print_every": "20 steps"},
    }
)
_BARS = "▁▂▃▄▅▆▇█"


def demo(
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Train a small model here and verify its plan, offline, < 60 s."""
    from meshwright.training.config import load_config

    started = time.perf_counter()
    resolved = load_config(None, built_in=DEMO, built_in_name="demo")
    processes = resolved.config.plan.processes
    require_torch()
    with stdout_to_stderr(active=json_output):
        print(
            f" 1/5 machine   {_machine_line(inspect_machine(Path.cwd()))} → {processes} CPU processes",
            flush=True,
        )
        from meshwright.launching import launch_config
        from meshwright.launching.jobs import plan_of_run
        from meshwright.launching.planned import Planned, with_keys

        plan = plan_of_run(resolved)
        if plan.predicted is None:  # no figures of this machine: the plan is all given
            plan = Planned(with_keys(resolved, {"mode": "given"}, origin="demo"))
        print(f" 2/5 plan      {plan_line(plan.predicted)}")
        print(f" 3/5 train     {resolved.config.model.source}, {resolved.config.train.stop_at}", flush=True)
        result = launch_config(plan.resolved, json_output=json_output, plan=plan)
        if not result:  # under torchrun or SLURM every rank runs this command, and only rank 0 has a result
            return
        for line in _training_lines(result):
            print(line, flush=True)
        from meshwright.launching.verify import SourceOptions, verify_loaded

        verified = verify_loaded(
            lambda overrides: load_config(
                None, ["plan.mode=given", *overrides], built_in=DEMO, built_in_name="demo"
            ),
            SourceOptions(),
        )
        print(verify_line(verified, processes=processes))
        run_dir = Path(str(result["run_dir"]))
        keep_result(run_dir, verified)
        page = write_report([read_run(run_dir)])
        print(f" 5/5 report    {page}")
        for line in _last_lines(result, seconds=time.perf_counter() - started):
            print(line)
    if json_output:
        print_json(
            {"plan": plan.predicted, "train": result, "verify": verified.to_json(), "report": str(page)}
        )
    if not verified.ok:
        raise typer.Exit(EXIT_VERIFY_FAILED)


def plan_line(predicted: Mapping[str, object] | None) -> str:
    """What the plan says of a step; a machine without figures says nothing."""
    if predicted is None:
        return "not priced: nothing is known of this machine"
    memory, seconds = predicted["memory_bytes"], predicted["step_seconds"]
    assert isinstance(memory, Mapping), "bytes by name"
    return f"zero1x2 of this host as it was measured: {seconds:.3f} s a step, {memory['peak'] / 2**20:.0f} MiB a rank"


def _machine_line(machine: Machine) -> str:
    gpus = f"{len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else "no GPU"
    return f"{machine.cores:g} cores, {machine.memory_bytes / 2**30:.0f} GiB, {gpus}"


def _training_lines(result: Mapping[str, object]) -> list[str]:
    losses = read_losses(Path(str(result["run_dir"])) / "metrics.jsonl")
    peaks = result["peak_memory_bytes"]
    assert isinstance(peaks, list), "peak_memory_bytes has one figure a rank"
    lines = [
        f"     loss      {result['first_loss']:.4f} {sparkline(losses)} {result['final_loss']:.4f}"
        f"   held-out {result['eval_loss']:.4f} nats a byte",
        f"     speed     {result['tokens_per_second']:,.0f} tokens/s   {result['step_seconds_median']:.3f} s "
        f"a step   peak {max(peaks) / 2**20:.0f} MiB a rank",
    ]
    said = result.get("prediction")
    if isinstance(said, Mapping):
        lines.append(
            f"     compared  step {said['step_error']:+.0%}, peak {said['memory_error']:+.0%}: predicted against "
            "measured"
        )
    return lines


def verify_line(result: VerifyResult, *, processes: int | None) -> str:
    """What the comparison found, in one line; the whole table where it failed."""
    if not result.ok:
        return f" 4/5 verify    failed\n{result.table()}"
    loss, gradients = result.check("loss"), result.check("gradients")
    return (
        f" 4/5 verify    {processes} processes == 1 process   loss diff {loss.worst_relative:.1e}   "
        f"{gradients.compared}/{gradients.compared} gradients ✓"
    )


def _last_lines(result: Mapping[str, object], *, seconds: float) -> list[str]:
    return [
        f"done in {seconds:.0f} s, kept in {result['run_dir']}",
        "now try   meshwright train my_script.py -n 2     meshwright learn 0     meshwright explain zero1",
    ]


def read_losses(path: Path) -> list[float]:
    """The loss of every step of a run, in order."""
    with path.open() as lines:
        return [float(json.loads(line)["loss"]) for line in lines]


def sparkline(values: list[float], *, width: int = 10) -> str:
    """`width` bars (fewer if there are fewer values), each the mean of its share, lowest to highest value."""
    width = min(width, len(values))
    if width == 0:
        return ""
    cuts = [len(values) * part // width for part in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)
