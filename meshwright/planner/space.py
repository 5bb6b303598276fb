"""All layouts of a job on a cluster: degrees by divisors, then what is chosen on a mesh; what is fixed has one value.

Owns the values that each dimension takes. Must not know prices. Left out because another layout is never slower nor
larger (held by tests): gpipe and serial beside 1f1b, no sequence parallelism where it is legal, and cp with a
micro-batch that has a common divisor with it, where more of dp does the same without messages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from meshwright.planner.request import Request
from meshwright.planner.rules import refuse_mesh
from meshwright.simulation.job import ContextKind, Layout, Recompute, Schedule, with_changes

# Most sequences of a micro-step: beyond, products are as fast as they get.
_MOST_MICRO = 64
_CHUNKS = (2, 3, 4, 6, 8)
_SHARED_NODES = (1, 4, 16)


@dataclass(frozen=True)
class Group:
    """Layouts that differ in schedule, recomputation and what data-parallel ranks share.

    Attributes:
        start: what they have in common.
        schedules: with chunks.
        recomputes: words.
        shares: (zero, ranks that share; 0: all).
        is_beaten: whether for each of them another layout is never slower nor larger.
    """

    start: Layout
    schedules: tuple[tuple[Schedule, int], ...]
    recomputes: tuple[Recompute, ...]
    shares: tuple[tuple[int, int], ...]
    is_beaten: bool = False


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [part for part in range(1, int(number**0.5) + 1) if number % part == 0]
    return sorted({*small, *(number // part for part in small)})


def groups(request: Request, rejected: dict[str, int], *, every: bool = False) -> Iterator[Group]:
    """Every group with a legal mesh; refused meshes are counted in `rejected` by reason.

    Args:
        request: the question.
        rejected: changed in place.
        every: also groups that others beat, which may be all that training can run.
    """
    recomputes = _recomputes(request)
    for mesh in meshes(request):
        refused = refuse_mesh(request, mesh)
        if refused is not None:
            rejected[refused.reason] = rejected.get(refused.reason, 0) + 1
            continue
        schedules, shares = _schedules(request, mesh), _shares(request, mesh)
        for start, is_beaten in _starts(request, mesh, every=every):
            yield Group(start, schedules, recomputes, shares, is_beaten)


def _starts(request: Request, mesh: Layout, *, every: bool) -> Iterator[tuple[Layout, bool]]:
    """Layouts that differ in more than a group does, and whether others are never worse."""
    variants = _variants(request, mesh, every=every)
    kinds = _context_kinds(request, mesh)
    orders = (False, True) if mesh.pp > 1 and mesh.dp * mesh.cp > 1 else (False,)
    for micro, inside, kind in itertools.product(_micro_batches(request, mesh), orders, kinds):
        for parallel, halves, is_beaten in variants:
            start = with_changes(
                mesh,
                micro_batch=micro,
                pipeline_inside=inside,
                cp_kind=kind,
                sequence_parallel=parallel,
                half_layers=halves,
            )
            yield start, is_beaten


def meshes(request: Request) -> Iterator[Layout]:
    """Every factorisation of the cluster that keeps what is fixed."""
    total = request.cluster.num_devices
    for tp in _sizes(request, "tp", total):
        for pp in _sizes(request, "pp", total // tp):
            for cp in _sizes(request, "cp", total // tp // pp):
                dp = total // tp // pp // cp
                if request.size("dp") in (None, dp):
                    # What ranks share is a dimension of its own, and what is fixed of it counts in cp as well.
                    yield with_changes(request.base, tp=tp, pp=pp, cp=cp, dp=dp, zero=0, shard=0)


def _sizes(request: Request, axis: str, total: int) -> list[int]:
    fixed = request.size(axis)
    if fixed is None:
        return divisors(total)
    return [fixed] if total % fixed == 0 else []


def _micro_batches(request: Request, mesh: Layout) -> list[int]:
    fixed = request.size("micro_batch")
    if fixed is not None:
        return [fixed]
    own = request.work.global_batch // mesh.dp
    free = not {"dp", "cp"} & set(request.fixed)
    return [part for part in divisors(own) if part <= _MOST_MICRO and not (free and _is_dp(part, mesh))]


def _is_dp(micro: int, mesh: Layout) -> bool:
    """Whether more of dp and less of cp does the same; groups of one more axis would have buffers of their own."""
    shared = math.gcd(micro, mesh.cp)
    return shared > 1 and (mesh.dp > 1 or shared == mesh.cp)


def _context_kinds(request: Request, mesh: Layout) -> tuple[ContextKind, ...]:
    if mesh.cp == 1:
        return ("ring",)
    if "cp_kind" in request.fixed:
        return (cast(ContextKind, request.fixed["cp_kind"]),)
    return ("ring", "ulysses", "allgather")


def _recomputes(request: Request) -> tuple[Recompute, ...]:
    if "recompute" in request.fixed:
        return (cast(Recompute, request.fixed["recompute"]),)
    if request.base.attention != "unfused":
        return ("none", "half", "full")  # fused attention keeps no scores that selective could drop
    return ("none", "selective", "half", "full")


def _variants(request: Request, mesh: Layout, *, every: bool) -> list[tuple[bool, bool, bool]]:
    """(sequence parallelism, half layers as cut units, whether another is never worse): halves only where they divide
    and whole layers do not."""
    layers = request.work.model.num_layers
    cuts = mesh.tp > 1 and request.work.seq_len % (mesh.tp * mesh.cp) == 0
    parallel = [cuts] if not (cuts and every) else [True, False]
    if "sequence_parallel" in request.fixed:
        parallel = [bool(request.fixed["sequence_parallel"])]
    halves = mesh.pp > 1 and layers % mesh.pp != 0 and 2 * layers % mesh.pp == 0
    # Neither way of cutting is always better: whole layers may leave the last stage less beside its head.
    cut_halves = [True, False] if halves else [False]
    if "half_layers" in request.fixed:
        cut_halves = [mesh.pp > 1 and bool(request.fixed["half_layers"])]
    return [(first, second, first != parallel[0]) for first in parallel for second in cut_halves]


def _schedules(request: Request, start: Layout) -> tuple[tuple[Schedule, int], ...]:
    if start.pp == 1:
        return (("1f1b", 1),)
    fixed, chunks = request.fixed.get("schedule"), request.size("chunks")
    interleaved: list[tuple[Schedule, int]] = [
        ("interleaved", v) for v in _CHUNKS if start.pp * v <= request.work.model.num_layers + 2
    ]
    if chunks is not None:
        interleaved = [("interleaved", chunks)] if chunks > 1 else []
    if fixed == "interleaved":
        return tuple(interleaved)
    if fixed is not None:
        return ((cast(Schedule, fixed), 1),)
    others: tuple[Schedule, ...] = ("1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe")
    if chunks is not None and chunks > 1:
        return tuple(interleaved)
    return (*((name, 1) for name in others), *interleaved)


def _shares(request: Request, start: Layout) -> tuple[tuple[int, int], ...]:
    """Stages of ZeRO, and over how many ranks: all, or those of a few nodes."""
    zero, hsdp = request.size("zero"), request.size("hsdp")
    ranks = start.dp * start.cp
    stages = (0, 1, 2, 3)[1 if hsdp else 0 :] if zero is None else (zero,)
    if hsdp:
        parts = [hsdp * start.cp]
    else:
        node = request.cluster.devices_per_node // start.tp
        parts = [0, *(n * node for n in _SHARED_NODES if _is_share(n * node, start))]
    if ranks == 1:
        return tuple((stage, 0) for stage in stages if stage == 0 or zero is not None)
    return tuple((stage, part) for stage in stages for part in (parts if stage else [0]))


def _is_share(part: int, start: Layout) -> bool:
    return 1 < part < start.dp * start.cp and part % start.cp == 0 and start.dp % (part // start.cp) == 0
