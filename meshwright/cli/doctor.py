"""`meshwright doctor`: what this machine is and what would stop a run; `--measure` writes cluster.toml.

Owns the verb's lines and the measured file. The inspection is in `machine.py`, the timing in `measurement.py`,
which runs in a process of its own, because this one never imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.machine import Machine, find_problems, inspect_machine
from meshwright.cli.output import print_json
from meshwright.cli.train import require_torch
from meshwright.errors import WorkerError, writing

CLUSTER_FILE = Path("cluster.toml")


def doctor(
    measure: Annotated[bool, typer.Option("--measure", help="Time this host; write cluster.toml.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """This machine, and what would stop a run."""
    from meshwright.training.config import launch_environment

    machine = inspect_machine(Path.cwd())
    environment = launch_environment()
    problems = find_problems(machine, environment)
    if not json_output:
        print("\n".join(_lines(machine, environment, problems)), flush=True)
    measured = measure_machine() if measure else None
    host = None
    if measured is not None:
        with writing(CLUSTER_FILE):
            CLUSTER_FILE.write_text(cluster_toml(machine, measured), encoding="utf-8")
        host = _measure_host(machine)
    if json_output:
        report: dict[str, object] = {**dataclasses.asdict(machine), "environment": environment}
        report |= {
            "problems": problems,
            "measured": measured,
            "host_file": None if host is None else str(host),
        }
        print_json(report)
    elif measured is not None:
        print("\n".join(_measured_lines(measured)))
        print(
            f"wrote {CLUSTER_FILE}"
            + ("" if host is None else f" and {host}, by which plans for this host are priced")
        )


def _measure_host(machine: Machine) -> Path | None:
    """Time what CPU ranks of this host do beside a model's own products, anew; None where ranks would be GPUs."""
    if machine.gpus:
        return None
    from meshwright.launching.this_host import host_file, measure_anew
    from meshwright.training.config import default_cache_dir

    cache = default_cache_dir()
    measure_anew(cache)
    return host_file(cache)


def measure_machine() -> dict[str, object]:
    """Time products and copies in a process of its own; the keys are those of `measurement.measure`.

    Raises:
        ConfigError: E001 without torch.
        WorkerError: E401 when the measuring process fails.
    """
    require_torch()
    command = [sys.executable, "-m", "meshwright.cli.measurement"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-3:])
        text = f"the measuring process ended with code {done.returncode}; run `{' '.join(command)}`. {tail}"
        raise WorkerError("E401", text)
    measured = json.loads(done.stdout)
    assert isinstance(measured, dict), "measurement prints one object"
    return measured


def cluster_toml(machine: Machine, measured: dict[str, object]) -> str:
    """The measured machine as a cluster file: FLOP/s by number format, memory in bytes and bytes/s."""
    products = measured["products"]
    assert isinstance(products, list), "products is a list of rows"
    best: dict[str, float] = {}
    for row in products:
        best[row["dtype"]] = max(best.get(row["dtype"], 0.0), row["flops_per_second"])
    memory = sum(gpu.memory_bytes for gpu in machine.gpus[:1]) or machine.memory_bytes
    rows = "".join(
        f'\n[[products]]\ndtype = "{row["dtype"]}"\nsize = {row["size"]}\nseconds = {row["seconds"]:.6g}\n'
        f"flops_per_second = {row['flops_per_second']:.6g}\n"
        for row in products
    )
    flops = "".join(f"{dtype} = {value:.6g}\n" for dtype, value in best.items())
    return (
        "# Written by `meshwright doctor --measure`: measured, not from a data sheet. Links are not measured.\n"
        f"num_nodes = 1\ndevices_per_node = {len(machine.gpus) or 1}\n\n"
        f"[machine]\nname = {json.dumps(measured['device'], ensure_ascii=False)}\n"
        f"memory_bytes = {memory}\nmemory_bandwidth = {measured['copy_bytes_per_second']:.6g}\n"
        f"num_threads = {measured['num_threads']}\n\n[machine.flops]\n{flops}{rows}"
    )


def _lines(machine: Machine, environment: dict[str, str], problems: list[str]) -> list[str]:
    shared = machine.shared_memory_bytes
    gpus = [f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in machine.gpus]
    rows = [
        ("system", f"{machine.system}, Python {machine.python}, torch {machine.torch or 'not installed'}"),
        ("cores", f"{machine.cores:g}"),
        ("memory", f"{machine.memory_bytes / 2**30:.1f} GiB"),
        ("gpus", " · ".join(gpus) or "none"),
        ("/dev/shm", "none" if shared is None else f"{shared / 2**30:.1f} GiB free"),
        ("disk", f"{machine.disk_free_bytes / 2**30:.1f} GiB free here"),
        ("loopback", "a free port can be opened" if machine.loopback else "no port can be opened"),
        ("launch", " ".join(f"{name}={value}" for name, value in environment.items()) or "no variables set"),
    ]
    return [f"{name:10} {text}" for name, text in rows] + [
        f"{'problem':10} {text}" for text in problems or ["none found"]
    ]


def _measured_lines(measured: dict[str, object]) -> list[str]:
    products, peaks, copied = (
        measured[name] for name in ("products", "peak_flops_per_second", "copy_bytes_per_second")
    )
    assert isinstance(products, list), "products is a list of rows"
    assert isinstance(peaks, dict), "peaks by number format"
    assert isinstance(copied, float), "bytes a second"
    best = {row["dtype"]: 0.0 for row in products}
    for row in products:
        best[row["dtype"]] = max(best[row["dtype"]], row["flops_per_second"])
    lines = [f"square products on {measured['device']}, {measured['num_threads']} threads"]
    for row in products:
        peak = peaks.get(row["dtype"])
        of = f"of the data sheet's {peak / 1e12:g} TFLOP/s (HFU)" if peak else "of the best product here"
        share = row["flops_per_second"] / (peak or best[row["dtype"]])
        rate = row["flops_per_second"] / 1e9
        lines.append(f"  {row['dtype']} {row['size']:5}²  {rate:10.1f} GFLOP/s  {share:6.1%} {of}")
    lines.append(f"  copy        {copied / 1e9:10.1f} GB/s, read and written")
    return lines
