"""Which layouts are legal, in one place: each rule says what it counts as, and with which numbers it refused.

Owns all reasons for which a layout is not priced. Rules of a mesh look at degrees only, so that one refusal spares all
layouts on that mesh; rules of a layout look at the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.request import Request
from meshwright.simulation.job import Layout, num_microbatches

NOTHING_TO_SHARE = "nothing to share"
_ZERO_BUBBLE = ("zb-h1", "zb-h2", "zb-v", "dualpipe")
_TWO_PARTS = ("zb-v", "dualpipe")


@dataclass(frozen=True)
class Rejection:
    """Attributes: reason, the same for all refusals of a rule; detail, with this layout's numbers."""

    reason: str
    detail: str


# What a user can fix that only an axis of more than one rank has: key, axis, the value that every mesh has.
_OF_AXES = (
    ("schedule", "pp", "1f1b"),
    ("chunks", "pp", 1),
    ("half_layers", "pp", False),
    ("cp_kind", "cp", "ring"),
    ("sequence_parallel", "tp", False),
)


def _refuse_fixed(request: Request, mesh: Layout) -> Rejection | None:
    """What is fixed must be kept: it cannot be where its axis has one rank."""
    for key, axis, default in _OF_AXES:
        value = request.fixed.get(key, default)
        if value != default and getattr(mesh, axis) == 1:
            return Rejection(f"{key} needs {axis}", f"{key}={value} needs {axis} of at least 2")
    hsdp = request.size("hsdp")
    if hsdp and request.size("zero") == 0:
        return Rejection(
            "hsdp needs zero", f"hsdp={hsdp} ranks share by zero=1, 2 or 3; zero=0 shares nothing"
        )
    if hsdp and mesh.dp % hsdp:
        return Rejection("hsdp does not divide dp", f"hsdp={hsdp} does not divide dp={mesh.dp}")
    return None


def refuse_mesh(request: Request, mesh: Layout) -> Rejection | None:
    """Why no layout with these degrees is legal; None where one may be."""
    work, cluster = request.work, request.cluster
    model, tp, cp, pp, dp = work.model, mesh.tp, mesh.cp, mesh.pp, mesh.dp
    if model.num_heads % tp:
        return Rejection(
            "tp does not divide the heads", f"tp={tp} does not divide {model.num_heads} heads of {model.name}"
        )
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        return Rejection(
            "tp does not divide the key/value heads",
            f"tp={tp} and {model.num_kv_heads} key/value heads: neither divides the other",
        )
    if model.ffn_dim % tp:
        return Rejection(
            "tp does not divide the feed-forward width", f"tp={tp} does not divide a width of {model.ffn_dim}"
        )
    if tp > cluster.devices_per_node and "tp" not in request.fixed:
        return Rejection(
            "tp would leave a node",
            f"tp={tp} exceeds the {cluster.devices_per_node} devices of a node: its collectives of every layer would "
            "cross the network (write tp in --plan to have it all the same)",
        )
    if work.seq_len % (2 * cp) and cp > 1:
        return Rejection(
            "cp does not divide the sequence",
            f"cp={cp} cuts a sequence into {2 * cp} chunks, and {work.seq_len} tokens do not divide",
        )
    units = 2 * model.num_layers
    if pp > units:
        return Rejection(
            "more stages than half layers", f"pp={pp} exceeds the {units} half layers of {model.name}"
        )
    if work.global_batch % dp:
        return Rejection(
            "dp does not divide the batch", f"dp={dp} does not divide a batch of {work.global_batch}"
        )
    micro = request.size("micro_batch")
    if micro and work.global_batch % (dp * micro):
        return Rejection(
            "micro_batch does not divide the batch",
            f"dp={dp} x micro_batch={micro} does not divide a batch of {work.global_batch}",
        )
    return _refuse_fixed(request, mesh)


def refuse_layout(request: Request, layout: Layout) -> Rejection | None:
    """Why this layout on a legal mesh is not legal."""
    work, pp = request.work, layout.pp
    if layout.zero and layout.dp * layout.cp == 1:
        return Rejection(NOTHING_TO_SHARE, f"zero={layout.zero} shares over dp x cp, which is 1")
    if layout.sequence_parallel and work.seq_len % (layout.cp * layout.tp):
        return Rejection(
            "sequence parallelism does not divide the sequence",
            f"tp={layout.tp} x cp={layout.cp} do not divide {work.seq_len} tokens",
        )
    if layout.cp_kind == "ulysses" and _heads_of_rank(request, layout) % layout.cp:
        return Rejection(
            "ulysses needs heads for all of cp",
            f"cp={layout.cp} does not divide the {_heads_of_rank(request, layout)} heads that tp={layout.tp} leaves",
        )
    return _refuse_pipeline(request, layout) if pp > 1 else None


def _heads_of_rank(request: Request, layout: Layout) -> int:
    return max(1, request.work.model.num_heads // layout.tp)


def _refuse_pipeline(request: Request, layout: Layout) -> Rejection | None:
    num_layers, m = request.work.model.num_layers, num_microbatches(request.work, layout)
    parts = layout.chunks if layout.schedule == "interleaved" else 2 if layout.schedule in _TWO_PARTS else 1
    stages = layout.pp * parts
    if layout.half_layers and parts > 1:
        return Rejection("half layers with several stages a rank", f"{layout.schedule} cuts whole layers")
    # Embedding and head may be stages of their own, counted as a layer each.
    if not layout.half_layers and stages > num_layers and stages != num_layers + 2:
        return Rejection(
            "more stages than layers", f"{layout.pp} ranks x {parts} stages exceed {num_layers} layers"
        )
    if parts > 1 and num_layers % stages and (num_layers + 2) % stages:
        return Rejection(
            "stages of several a rank are not equal", f"{stages} stages do not divide {num_layers} layers"
        )
    if layout.schedule == "interleaved" and m % layout.pp:
        return Rejection(
            "micro-batches are no multiple of pp", f"interleaved: {m} micro-batches on {layout.pp} stages"
        )
    if layout.schedule == "dualpipe" and (layout.pp % 2 or m % 2 or m < 2 * layout.pp):
        return Rejection(
            "dualpipe needs even stages and twice as many micro-batches",
            f"pp={layout.pp} with {m} micro-batches; it needs an even pp and an even number from {2 * layout.pp}",
        )
    if layout.schedule == "zb-v" and m < 2 * layout.pp:
        return Rejection(
            "zero bubble with too few micro-batches",
            f"zb-v on {layout.pp} ranks is an order of at least {2 * layout.pp} micro-batches, here are {m}",
        )
    if layout.schedule in _ZERO_BUBBLE and layout.recompute in ("full", "half"):
        return Rejection(
            "zero bubble with recomputation",
            f"{layout.schedule} keeps what gradients of weights need, recompute={layout.recompute} does not",
        )
    return None
