"""What plans said against what steps took: 22 plans over all dimensions on 2 to 4 processes of this host.

The host is measured first, as `meshwright doctor --measure` and `plan` do. Then each plan trains in processes of its
own for its memory; then all plans of a number of processes train in the same processes in turn, order rotating, one
thread each. Bars: |error| of the step's time 8 % in the median and 20 % at most, of memory 8 %; the chosen plan
takes at most 1.05 x the fastest measured one.

    python benchmarks/plans.py [--rounds 10] [--inner 1] [--json plans.json]        8 minutes on 2 cores
    python benchmarks/plans.py --tiny                                               a smoke run

What is done stands in the JSON file, plan by plan, and is not done again; remove the file to begin anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import launch, race

from meshwright.comm.log import CommLog
from meshwright.comm.mesh import World
from meshwright.launching import launch_config
from meshwright.launching.this_host import located, measure_anew
from meshwright.planner.asking import ask, sections_of
from meshwright.planner.plans import make_plans
from meshwright.planner.request import Request
from meshwright.planner.runnable import plan_keys
from meshwright.simulation.job import Layout
from meshwright.simulation.prediction import Prediction, predict
from meshwright.simulation.reading import layout_of, plan_values
from meshwright.training.config import Resolved, load_config
from meshwright.training.console import Console
from meshwright.training.loop import Run

PLANS = {
    2: (
        "zero=0,micro_batch=6",
        "zero=0,micro_batch=1",
        "zero=1,micro_batch=2",
        "zero=2,micro_batch=3",
        "zero=3,micro_batch=2",
        "zero=0,micro_batch=3,recompute=full",
        "tp=2,micro_batch=4",
        "tp=2,sequence_parallel=true,micro_batch=6",
        "pp=2,micro_batch=2",
        "pp=2,schedule=gpipe,micro_batch=3",
        "pp=2,schedule=zb-h1,micro_batch=1",
        "pp=2,schedule=interleaved,chunks=2,micro_batch=2",
        "cp=2,micro_batch=4",
        "cp=2,cp_kind=ulysses,micro_batch=6",
    ),
    3: ("zero=1,micro_batch=2", "pp=3,micro_batch=1"),
    4: (
        "zero=2,micro_batch=1",
        "tp=2,zero=1,micro_batch=3",
        "tp=4,micro_batch=4",
        "pp=4,micro_batch=1",
        "pp=2,zero=1,micro_batch=1",
        "cp=2,tp=2,micro_batch=4",
    ),
}
TINY = {2: ("zero=1,micro_batch=2", "pp=2,micro_batch=1")}
MODEL = {"num_layers": 4, "dim": 256, "num_heads": 8, "num_kv_heads": 8, "ffn_dim": 1024, "max_seq_len": 256}
SETTINGS = (
    "model.source=preset:gpt-nano",
    "data.train=stdlib",
    "train.eval_every=never",
    "train.clip_norm=1.0",
)
BARS = {"median": 0.08, "most": 0.20, "memory": 0.08, "chosen": 1.05}


def settings_of(tiny: bool, processes: int, plan: str, cache: Path) -> Resolved:
    """The run of one plan."""
    model = {**MODEL, "num_layers": 2, "dim": 32, "ffn_dim": 64, "max_seq_len": 32} if tiny else MODEL
    keys = [f"model.{name}={value}" for name, value in model.items()]
    keys += [f"data.seq_len={model['max_seq_len']}", "train.global_batch=12", "train.stop_at=4 steps"]
    keys += [f"plan.{key.strip()}" for key in plan.split(",") if key.strip()]
    return load_config(None, [*SETTINGS, *keys, f"plan.processes={processes}", f"data.cache_dir={cache}"])


def question(tiny: bool, processes: int, cache: Path) -> Request:
    """What the planner is asked for this number of processes, with nothing fixed."""
    return located(ask(sections_of(settings_of(tiny, processes, "", cache)), {}), cache, measures=True)


def predicted(request: Request, plan: str) -> Prediction:
    layout = layout_of({"precision": "fp32", **plan_values(plan)}, num_devices=request.cluster.num_devices)
    return predict(request.work, layout, request.cluster)


def as_text(layout: Layout) -> str:
    """A layout as the benchmark writes plans."""
    keys = {key: value for key, value in plan_keys(layout).items() if key not in ("dp", "precision")}
    return ",".join(f"{key}={str(value).lower()}" for key, value in keys.items())


def memory_of(resolved: Resolved) -> dict[str, Any]:
    """Resident peak of the fullest rank, and the ledger, of a run in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        config = resolved.config.model_copy(
            update={"save": resolved.config.save.model_copy(update={"dir": Path(folder) / "run"})}
        )
        result = launch_config(replace(resolved, config=config), json_output=True)
    return {"bytes": max(result["peak_memory_bytes"]), "ledger": result["memory_bytes"]}


def on_rank(rank: int, size: int, runs: dict[str, Any], rounds: int, inner: int) -> dict[str, list[float]]:
    """Seconds of a step of each run in every round."""
    world = World(rank=rank, size=size, local_rank=rank, local_size=size)
    candidates: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        for name, config in runs.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            device = torch.device("cpu")
            run = Run(
                config, world, run_dir=folder, console=Console(None), device=device, log=CommLog(rank, size)
            )
            stack.enter_context(closing(run.mesh))
            run.task.model.train()
            candidates[name] = Stepper(run)
        timings = race(candidates, rounds=rounds, inner=inner, warmup=2)
    return {name: [milliseconds / 1e3 for milliseconds in timing.wall] for name, timing in timings.items()}


class Stepper:
    """One more step of a run at each call."""

    def __init__(self, run: Run) -> None:
        self._run, self._number = run, 0

    def __call__(self) -> float:
        self._number += 1
        return self._run.make_step(self._number - 1).loss


class Store:
    """What is done, in a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.done: dict[str, Any] = {}
        if path is not None and path.is_file():
            self.done = json.loads(path.read_text())

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self.done:
            self.done[key] = make()
            if self._path is not None:
                self._path.write_text(json.dumps(self.done, indent=1))
        return self.done[key]


def session(processes: int, options: argparse.Namespace, cache: Path, store: Store) -> list[dict[str, Any]]:
    """All plans of one number of processes: what was said, and what was."""
    request = question(options.tiny, processes, cache)
    chosen = as_text(make_plans(request).best.layout)
    names = list((TINY if options.tiny else PLANS)[processes])
    if all(as_text(predicted(request, name).layout) != chosen for name in names):
        names.append(chosen)
    runs = {name: settings_of(options.tiny, processes, name, cache) for name in names}
    memory = {}
    for name, resolved in runs.items():
        memory[name] = store.get(f"memory {processes} {name}", lambda r=resolved: memory_of(r))
        print(f"  memory of {name}: {memory[name]['bytes'] / 2**20:.0f} MiB", file=sys.stderr, flush=True)
    configs = {name: resolved.config for name, resolved in runs.items()}
    seconds = store.get(
        f"seconds {processes}",
        lambda: launch(on_rank, processes, configs, options.rounds, options.inner, pin=False),
    )
    return [row(predicted(request, name), name, seconds[name], memory[name], chosen=chosen) for name in names]


def row(
    said: Prediction, name: str, seconds: list[float], memory: dict[str, Any], *, chosen: str
) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "plan": name,
        "processes": said.layout.num_devices,
        "predicted": said.step.total,
        "measured": median,
        "quarters": statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [median] * 3,
        "error": said.step.total / median - 1,
        "parts": said.to_json()["step_parts"],
        "predicted_bytes": said.memory.peak,
        "measured_bytes": memory["bytes"],
        "memory_error": said.memory.peak / memory["bytes"] - 1,
        "is_chosen": as_text(said.layout) == chosen,
    }


def report(rows: list[dict[str, Any]]) -> str:
    lines = []
    for item in rows:
        mark = ">" if item["is_chosen"] else " "
        lines.append(
            f"{mark}{item['processes']} {item['plan']:52} {item['measured']:7.3f} s, predicted "
            f"{item['predicted']:7.3f} ({item['error']:+6.1%})   {item['measured_bytes'] / 2**20:5.0f} MiB "
            f"({item['memory_error']:+6.1%})"
        )
    errors = [abs(item["error"]) for item in rows]
    memory = [abs(item["memory_error"]) for item in rows]
    lines.append(
        f"step: median |error| {statistics.median(errors):.1%} (bar {BARS['median']:.0%}), most {max(errors):.1%} "
        f"(bar {BARS['most']:.0%}); memory: most {max(memory):.1%} (bar {BARS['memory']:.0%})"
    )
    for processes in sorted({item["processes"] for item in rows}):
        own = [item for item in rows if item["processes"] == processes]
        best = min(own, key=lambda item: item["measured"])
        chosen = next(item for item in own if item["is_chosen"])
        lines.append(
            f"{processes} processes: chosen {chosen['plan']} takes {chosen['measured'] / best['measured']:.3f} x the "
            f"best measured, {best['plan']} (bar {BARS['chosen']})"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--inner", type=int, default=1, help="steps of a timing")
    parser.add_argument("--tiny", action="store_true", help="a smoke run")
    parser.add_argument(
        "--cache", type=Path, help="folder of what was measured of the host; by default measured now"
    )
    parser.add_argument("--json", type=Path, help="what is done, plan by plan")
    options = parser.parse_args()
    started = time.perf_counter()
    with ExitStack() as stack:
        cache = options.cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = Store(options.json)
        if options.tiny:
            options.rounds = 1
        if options.cache is None:
            measure_anew(cache)
        rows = []
        for processes in TINY if options.tiny else PLANS:
            rows += session(processes, options, cache, store)
        print(report(rows))
    store.get("rows", lambda: rows)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
