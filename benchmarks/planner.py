"""Seconds of the planner: whole searches in CPU seconds, and the command from a cold start.

    python benchmarks/planner.py [--quick]

A search is what `meshwright plan` asks: the best meshes, the front, and what training runs. The command is a new
process that imports, searches and writes its file. The least of three.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.planner.request import make_request
from meshwright.planner.search import Wanted, search
from meshwright.presets import find_model
from meshwright.simulation.job import Workload
from meshwright.simulation.reading import parse_cluster

# Model, cluster, tokens of a sequence, sequences of a step.
SEARCHES = (
    ("gpt3-175b", "1024xa100", 2048, 1536),
    ("gpt3-175b", "3072xa100", 2048, 1536),
    ("gpt3-175b", "16384xh100", 2048, 6144),
    ("llama-3.1-405b", "16384xh100", 8192, 2048),
    ("llama-3.1-405b", "16384xh100", 131072, 128),
)
COMMAND = ("meshwright", "plan", "gpt3-175b", "--cluster", "1024xa100", "--batch", "1536")


def least(run: Callable[[], object], clock: Callable[[], float], rounds: int) -> float:
    """Seconds of the fastest of some rounds."""
    times = []
    for _ in range(rounds):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


def main(*, rounds: int) -> None:
    """Print a line a search, and one for the command."""
    for name, cluster, seq_len, batch in SEARCHES:
        request = make_request(Workload(find_model(name), seq_len, batch), parse_cluster(cluster), {})
        found = search(request, Wanted(ready=True))
        assert found.best is not None, f"{name} fits on {cluster}"
        seconds = least(lambda asked=request: search(asked, Wanted(ready=True)), time.process_time, rounds)
        print(
            f"{name:16s} {cluster:12s} seq {seq_len:6d}  {seconds:6.2f} CPU s  {found.num_priced:6,d} priced  "
            f"best {found.best.seconds:.3g} s"
        )
    with tempfile.TemporaryDirectory() as folder:
        command = (sys.executable, "-m", *COMMAND, "--out", str(Path(folder) / "plan.lock.json"))

        def start() -> None:
            subprocess.run(command, check=True, capture_output=True)

        print(f"{' '.join(COMMAND)}: {least(start, time.perf_counter, rounds):.2f} s from a cold start")


if __name__ == "__main__":
    main(rounds=1 if "--quick" in sys.argv[1:] else 3)
