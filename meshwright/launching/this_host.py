"""What this host is known to be: measured once, kept in the cache folder, extended where a model needs more.

Owns the file. Which parts a plan needs is `simulation/host_keys.py`'s, the timing `measuring.py`'s.
"""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, cast

from meshwright.errors import ConfigError
from meshwright.launching.local import run_local
from meshwright.launching.measure_order import Order
from meshwright.launching.messages import WorkerContext
from meshwright.planner.experience import experience_file, read_experience
from meshwright.planner.request import Request
from meshwright.presets.host import BlockTime, CollectiveTime, HostProfile, PartTime, profile_from
from meshwright.simulation.host_keys import (
    AttendShape,
    BlockShape,
    HeadShape,
    attend_of,
    block_of,
    head_of,
    is_known,
)
from meshwright.simulation.job import ContextKind, Layout, Workload, on_host

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
    """What was measured before; None where nothing was.

    Raises:
        ConfigError: E299 for a file that cannot be read.
    """
    path = host_file(cache)
    if not path.is_file():
        return None
    try:
        return profile_from(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "E299", f"{path} cannot be read: {error}. Remove it, and run `meshwright doctor --measure`"
        ) from error


def measure_anew(cache: Path) -> HostProfile:
    """This host without any model; what was known of it, and what runs taught, is forgotten.

    Raises:
        WorkerError: a measuring process failed.
    """
    host = _measure_machine()
    _keep(cache, host)
    experience_file(host_file(cache)).unlink(missing_ok=True)
    return host


def measured_host(cache: Path, work: Workload, processes: int) -> HostProfile:
    """This host with the parts of `work` on `processes` ranks; what is not known yet is measured now, and kept.

    Args:
        cache: folder of the file.
        work: a model and its batch.
        processes: ranks that plans may have.

    Raises:
        ConfigError: E299.
        WorkerError: a measuring process failed.
    """
    host = known_host(cache)
    if host is None:
        host = measure_anew(cache)
    blocks, heads, attends = shapes_of(work, processes)
    blocks = [shape for shape in blocks if not host.knows([shape.key])]
    heads = [shape for shape in heads if not host.knows([shape.key])]
    attends = [shape for shape in attends if not host.knows([shape.key])]
    if not (blocks or heads or attends):
        return host
    own = work.global_batch
    micro = tuple(size for size in _MICRO_BATCHES if size <= own) or (1,)
    order = Order(blocks=tuple(blocks), heads=tuple(heads), attends=tuple(attends), micro_batches=micro)
    found = _run(order, host.cores)
    host = replace(
        host,
        blocks=(*host.blocks, *_mean_blocks([one.blocks for one in found])),
        parts=(*host.parts, *_mean_parts([one.parts for one in found])),
    )
    _keep(cache, host)
    return host


def located(request: Request, cache: Path, *, measures: bool) -> Request:
    """The question with this host as it was measured, where its cluster is one of CPU processes.

    Args:
        request: the question.
        cache: folder of the file.
        measures: whether what is not known is measured now; else formulas are taken for it.
    """
    work, cluster = request.work, request.cluster
    if cluster.machine.name != "cpu" or cluster.host is not None or not is_known(work.model):
        return request
    keys = [shape.key for shapes in shapes_of(work, cluster.num_devices) for shape in shapes]
    host = measured_host(cache, work, cluster.num_devices) if measures else known_host(cache)
    if host is None or not host.knows(keys):
        return request
    learned = read_experience(experience_file(host_file(cache)))
    return replace(request, cluster=on_host(cluster, replace(host.only(keys), learned=learned)))


def shapes_of(work: Workload, processes: int) -> tuple[list[BlockShape], list[HeadShape], list[AttendShape]]:
    """What layouts of `work` on `processes` ranks run, each shape once: blocks, heads, attention under cp."""
    layouts = list(_layouts(work, processes))
    blocks = list(dict.fromkeys(block_of(work, layout) for layout in layouts))
    heads = list(dict.fromkeys(head_of(work, layout) for layout in layouts))
    attends = list(dict.fromkeys(shape for layout in layouts if (shape := attend_of(work, layout))))
    return blocks, heads, attends


def _layouts(work: Workload, processes: int) -> Iterator[Layout]:
    degrees = [size for size in range(1, processes + 1) if processes % size == 0]
    model = work.model
    for tp, cp in product(degrees, degrees):
        whole = model.num_heads % tp == 0 and model.ffn_dim % tp == 0 and work.seq_len % (2 * cp) == 0
        if processes % (tp * cp) or not whole:
            continue
        for kind in _KINDS if cp > 1 else _KINDS[:1]:
            if kind != "ulysses" or (model.num_heads // tp) % cp == 0:
                yield Layout(tp=tp, cp=cp, cp_kind=kind)


def _measure_machine() -> HostProfile:
    cores = num_cores()
    few = _run(Order(has_collectives=cores > 1, has_steps=True), cores)
    many = _run(Order(has_collectives=True), 2 * cores)
    steps = [one.step for one in few if one.step is not None]
    values = {name: mean(step[name] for step in steps) for name in steps[0]}
    collectives = tuple(
        replace(row, seconds=mean(_seconds_of(one, row) for one in found))
        for found in (few, many)
        for row in found[0].collectives
    )
    return HostProfile(
        name=platform.node(),
        cores=cores,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        process_bytes=int(values["process_bytes"]),
        step_seconds=values["step_seconds"],
        microbatch_seconds=values["microbatch_seconds"],
        layer_seconds=values["layer_seconds"],
        gather_seconds=values["gather_seconds"],
        accumulate_seconds=values["accumulate_seconds"],
        update_seconds=values["update_seconds"],
        collectives=collectives,
    )


def _seconds_of(found: Found, wanted: CollectiveTime) -> float:
    key = (wanted.op, wanted.ranks, wanted.bytes)
    return next(row.seconds for row in found.collectives if (row.op, row.ranks, row.bytes) == key)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(order: Order, processes: int) -> list[Found]:
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
        yield replace(rows[0], **values)


def _mean_parts(of_ranks: Iterable[tuple[PartTime, ...]]) -> Iterator[PartTime]:
    for rows in zip(*of_ranks, strict=True):
        yield replace(
            rows[0],
            forward=mean(row.forward for row in rows),
            backward=mean(row.backward for row in rows),
        )


def _keep(cache: Path, host: HostProfile) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    path = host_file(cache)
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(host.to_json(), encoding="utf-8")
    whole.replace(path)  # another process may read it now
