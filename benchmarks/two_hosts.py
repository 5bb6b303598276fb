"""Two hosts made of network namespaces, joined by a cable of 200 Mbit/s and then of 5 Gbit/s: does the plan follow?

Each host has one rank on one core. All candidates train in the same processes in turn over a link that `tc tbf` limits.
Bars: the plan chosen for one rate is another than for the other, and each takes at most 1.05 x the fastest measured.
Where namespaces or tc are not allowed (they need root), it says so and ends.

    python benchmarks/two_hosts.py [--rounds 5] [--cache FOLDER] [--json FILE]          3 minutes on 2 cores
    python benchmarks/two_hosts.py --tiny                                               a smoke run
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import race
from plans import Stepper, as_text, predicted, question, settings_of

from meshwright.comm.log import CommLog
from meshwright.comm.mesh import World
from meshwright.planner.plans import make_plans
from meshwright.planner.request import Request
from meshwright.testing.hosts import Host, two_hosts, why_no_hosts
from meshwright.training.console import Console
from meshwright.training.loop import Run

RATES = {"200mbit": 200e6 / 8, "5gbit": 5e9 / 8}
PLANS = (
    "zero=0,micro_batch=6",
    "zero=1,micro_batch=3",
    "pp=2,micro_batch=2",
    "pp=2,micro_batch=1",
    "tp=2,micro_batch=6",
)
PORT = 29411
BAR = 1.05


def measured(names: list[str], rate: str, options: argparse.Namespace, cache: Path) -> dict[str, list[float]]:
    """Seconds of a step of each plan in every round."""
    configs = {name: settings_of(options.tiny, 2, name, cache).config for name in names}
    with two_hosts(rate) as hosts, tempfile.TemporaryDirectory() as folder:
        order, answer = Path(folder) / "order", Path(folder) / "answer"
        order.write_bytes(pickle.dumps((configs, options.rounds, str(answer))))
        workers = [start(host, rank, hosts[0], order) for rank, host in enumerate(hosts)]
        codes = [worker.wait() for worker in workers]
        if any(codes):
            raise SystemExit(f"workers ended with {codes}")
        found: dict[str, list[float]] = json.loads(answer.read_text())
    return found


def start(host: Host, rank: int, first: Host, order: Path) -> subprocess.Popen[bytes]:
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": first.address,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": host.interface,
        "OMP_NUM_THREADS": "1",
    }
    command = host.command(sys.executable, __file__, "--worker", str(order))
    return subprocess.Popen(command, env={**os.environ, **own})


def work(order: Path) -> None:
    """One host's rank."""
    configs, rounds, answer = pickle.loads(order.read_bytes())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = World(rank=rank, size=2, local_rank=0, local_size=1)
    with ExitStack() as stack:
        candidates = {}
        for name, config in configs.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            run = Run(
                config,
                world,
                run_dir=folder,
                console=Console(None),
                device=torch.device("cpu"),
                log=CommLog(rank, 2),
            )
            stack.enter_context(closing(run.mesh))
            run.task.model.train()
            candidates[name] = Stepper(run)
        timings = race(candidates, rounds=rounds, inner=1, warmup=2)
    if rank == 0:
        Path(answer).write_text(
            json.dumps({name: [ms / 1e3 for ms in t.wall] for name, t in timings.items()})
        )
    dist.destroy_process_group()


def apart(request: Request, rate: float) -> Request:
    """The question for two hosts of one core each."""
    cluster = request.cluster
    assert cluster.host is not None, "the host was measured"
    host = replace(cluster.host, cores=1)
    return replace(
        request, cluster=replace(cluster, host=host, devices_per_node=1, nic_bytes_per_second=rate)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a smoke run")
    parser.add_argument(
        "--cache", type=Path, help="folder of what was measured of the host; by default measured now"
    )
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    if options.tiny:
        options.rounds = 1
    reason = why_no_hosts("1gbit")
    if reason:
        print(f"skipped: two hosts cannot be made here ({reason})")
        return
    with ExitStack() as stack:
        cache = options.cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        question_here = question(options.tiny, 2, cache)
        print(report(compare(question_here, options, cache), options))


def compare(here: Request, options: argparse.Namespace, cache: Path) -> dict[str, dict[str, Any]]:
    found = {}
    requests = {rate: apart(here, bytes_per_second) for rate, bytes_per_second in RATES.items()}
    chosen = {rate: as_text(make_plans(request).best.layout) for rate, request in requests.items()}
    names = list(dict.fromkeys((*PLANS, *chosen.values())))
    for rate, request in requests.items():
        seconds = measured(names, rate, options, cache)
        plans = {
            name: {
                "measured": statistics.median(seconds[name]),
                "predicted": predicted(request, name).step.total,
            }
            for name in names
        }
        found[rate] = {"chosen": chosen[rate], "plans": plans}
    return found


def report(found: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    lines = []
    for rate, item in found.items():
        best = min(item["plans"], key=lambda name: item["plans"][name]["measured"])
        for name, plan in item["plans"].items():
            mark = ">" if name == item["chosen"] else " "
            error = plan["predicted"] / plan["measured"] - 1
            lines.append(
                f"{mark}{rate:8} {name:40} {plan['measured']:.3f} s, predicted {plan['predicted']:.3f} ({error:+.0%})"
            )
        ratio = item["plans"][item["chosen"]]["measured"] / item["plans"][best]["measured"]
        lines.append(f" {rate}: chosen {item['chosen']} takes {ratio:.3f} x the best, {best} (bar {BAR})")
    choices = {item["chosen"] for item in found.values()}
    lines.append("the choice changes with the rate" if len(choices) > 1 else "the choice does not change")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
