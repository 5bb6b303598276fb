"""What this host is known to be: measured once, kept in the cache folder, extended where a model needs more.

Owns the file. Which parts a plan needs is `simulation/host_keys.py`'s, the timing `measuring.py`'s.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, cast

from meshwright.errors import ConfigError
from meshwright.launching.local import run_local
from meshwright.launching.measure_order import Order
from meshwright.launching.messages import WorkerContext
from meshwright.planner.experience import experience_file, read_experience
from meshwright.planner.request import Request
from meshwright.planner.rules import refuse_mesh
from meshwright.planner.space import meshes
from meshwright.presets.host import (
    BlockTime,
    CollectiveTime,
    HostProfile,
    OtherFormat,
    PartTime,
    profile_from,
)
from meshwright.simulation.host_keys import (
    AttendShape,
    BlockShape,
    HeadShape,
    attend_of,
    block_of,
    head_of,
    is_known,
)
from meshwright.simulation.job import Cluster, ContextKind, Layout, on_host

if TYPE_CHECKING:
    from meshwright.comm.mesh import World
    from meshwright.launching.measuring import Found

_KINDS: tuple[ContextKind, ...] = ("ring", "ulysses", "allgather")
_MICRO_BATCHES = (1, 4)


def host_file(cache: Path) -> Path:
    """Where this host is kept."""
    name = re.sub(r"[^\w.-]+", "_", platform.node()) or "host"
    return cache / f"host-{name}.json"


def known_host(cache: Path) -> HostProfile | None:
    """What was measured before; None where nothing was, or by another version.

    Raises:
        ConfigError: E299 for a file that cannot be read.
    """
    path = host_file(cache)
    if not path.is_file():
        return None
    try:
        return profile_from(path.read_text(encoding="utf-8"))
    except OtherFormat:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            "E299", f"{path} cannot be read: {error}. Remove it, and run `meshwright doctor --measure`"
        ) from error


def measure_anew(cache: Path) -> HostProfile:
    """This host without any model; what was known of it, and what runs taught, is forgotten.

    Raises:
        WorkerError: a measuring process failed.
    """
    cores = num_cores()
    host = _crowded(_new_host(_run(Order(has_collectives=True, has_steps=True), cores)))
    _keep(cache, host)
    experience_file(host_file(cache)).unlink(missing_ok=True)
    return host


def measured_host(cache: Path, request: Request) -> HostProfile:
    """This host with the parts of a model on its ranks; what is not known yet is measured now, and kept.

    Args:
        cache: folder of the file.
        request: the model, its batch, the ranks, and what is fixed of them.

    Raises:
        ConfigError: E299.
        WorkerError: a measuring process failed.
    """
    before = known_host(cache)
    host = before or _new_host(_run(Order(has_collectives=True, has_steps=True), num_cores()))
    processes = _processes(request.cluster, host)
    if processes > max(row.ranks for row in host.collectives):
        host = _crowded(host)
    known = host.known(processes)
    blocks, heads, attends = shapes_of(request)
    order = Order(
        blocks=tuple(shape for shape in blocks if shape.key not in known),
        heads=tuple(shape for shape in heads if shape.key not in known),
        attends=tuple(shape for shape in attends if shape.key not in known),
        micro_batches=tuple(size for size in _MICRO_BATCHES if size <= request.work.global_batch),
    )
    if order.blocks or order.heads or order.attends:
        found = _run(order, processes)
        of_blocks, parts = (
            _mean_blocks([one.blocks for one in found]),
            _mean_parts([one.parts for one in found]),
        )
        host = replace(host, blocks=(*host.blocks, *of_blocks), parts=(*host.parts, *parts))
    if host != before:
        _keep(cache, host)
    return host


def _processes(cluster: Cluster, host: HostProfile) -> int:
    """How many are measured at once for a cluster of such hosts: one a core, or two where it has more ranks."""
    ranks = min(cluster.num_devices, cluster.devices_per_node)
    return host.cores if ranks <= host.cores else 2 * host.cores


def located(request: Request, cache: Path, *, measures: bool) -> Request:
    """The question with this host as it was measured, where its cluster is one of CPU processes.

    Args:
        request: the question.
        cache: folder of the file.
        measures: whether what is not known is measured now; else formulas are taken for it.
    """
    cluster = request.cluster
    if cluster.machine.name != "cpu" or cluster.host is not None or not is_known(request.work.model):
        return request
    blocks, heads, attends = shapes_of(request)
    keys = [*(one.key for one in blocks), *(one.key for one in heads), *(one.key for one in attends)]
    host = measured_host(cache, request) if measures else known_host(cache)
    processes = 0 if host is None else _processes(cluster, host)
    if host is None or not set(keys) <= host.known(processes):
        return request
    learned = read_experience(experience_file(host_file(cache)))
    return replace(request, cluster=on_host(cluster, replace(host.only(keys, processes), learned=learned)))


def shapes_of(request: Request) -> tuple[list[BlockShape], list[HeadShape], list[AttendShape]]:
    """What layouts that may be asked for run, each shape once: blocks, heads, attention under cp."""
    work, layouts = request.work, list(_layouts(request))
    blocks = list(dict.fromkeys(block_of(work, layout) for layout in layouts))
    heads = list(dict.fromkeys(head_of(work, layout) for layout in layouts))
    attends = list(dict.fromkeys(shape for layout in layouts if (shape := attend_of(work, layout))))
    return blocks, heads, attends


def _layouts(request: Request) -> Iterator[Layout]:
    """tp and cp of every legal mesh, and kinds of attention."""
    kinds = [kind for kind in _KINDS if request.fixed.get("cp_kind") in (None, kind)]
    for mesh in meshes(request):
        if refuse_mesh(request, mesh) is None:
            for kind in kinds if mesh.cp > 1 else _KINDS[:1]:
                if kind != "ulysses" or (request.work.model.num_heads // mesh.tp) % mesh.cp == 0:
                    yield Layout(tp=mesh.tp, cp=mesh.cp, cp_kind=kind)


def _crowded(host: HostProfile) -> HostProfile:
    """With collectives of twice as many ranks as cores."""
    found = _run(Order(has_collectives=True), 2 * host.cores)
    return replace(host, collectives=(*host.collectives, *_mean_collectives(found)))


def _new_host(found: list[Found]) -> HostProfile:
    steps = [one.step for one in found if one.step is not None]
    values = {name: mean(step[name] for step in steps) for name in steps[0]}
    return HostProfile(
        name=platform.node(),
        cores=len(found),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        process_bytes=int(values["process_bytes"]),
        step_seconds=values["step_seconds"],
        microbatch_seconds=values["microbatch_seconds"],
        layer_seconds=values["layer_seconds"],
        gather_seconds=values["gather_seconds"],
        accumulate_seconds=values["accumulate_seconds"],
        update_seconds=values["update_seconds"],
        collectives=_mean_collectives(found),
    )


def _mean_collectives(found: list[Found]) -> tuple[CollectiveTime, ...]:
    rows = zip(*(one.collectives for one in found), strict=True)
    return tuple(replace(row[0], seconds=mean(one.seconds for one in row)) for row in rows)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(order: Order, processes: int) -> list[Found]:
    parts = ["collectives"] if order.has_collectives else []
    parts += ["a step beside its model"] if order.has_steps else []
    has_model = order.blocks or order.heads or order.attends
    parts += ["blocks, heads and attention of the model"] if has_model else []
    # Some seconds for each part; the answer itself may be all that stdout has.
    print(f"measuring this host on {processes} processes: {', '.join(parts)}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        found = run_local(partial(_measure, order), processes=processes, run_dir=Path(folder))
    return cast("list[Found]", found)


def _measure(order: Order, world: World, context: WorkerContext) -> Found:
    """The target of the workers."""
    # Imported here because it needs torch, which a launcher must not load.
    from meshwright.launching.measuring import measure_on_rank

    return measure_on_rank(order, world, context)


def _mean_blocks(of_ranks: Iterable[tuple[BlockTime, ...]]) -> Iterator[BlockTime]:
    for rows in zip(*of_ranks, strict=True):
        names = ("forward", "inputs", "weights", "core", "core_back")
        values = {name: mean(getattr(row, name) for row in rows) for name in names}
        yield replace(rows[0], processes=len(rows), **values)


def _mean_parts(of_ranks: Iterable[tuple[PartTime, ...]]) -> Iterator[PartTime]:
    for rows in zip(*of_ranks, strict=True):
        yield replace(
            rows[0],
            forward=mean(row.forward for row in rows),
            backward=mean(row.backward for row in rows),
            processes=len(rows),
        )


def _keep(cache: Path, host: HostProfile) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    path = host_file(cache)
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(host.to_json(), encoding="utf-8")
    whole.replace(path)  # another process may read it now
