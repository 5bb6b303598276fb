"""Whether training runs a priced layout today, and if not, why.

Owns the translation of a layout into the fields of a plan that training takes. What is built is asked of
`layout/check.py`, so that a key that is built later counts as soon as it stands there.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from meshwright.errors import MeshwrightError
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.layout.recompute import parse_recompute
from meshwright.simulation.job import Layout, Workload, with_changes

_BUILT = frozenset(item.name for item in dataclasses.fields(PlanRequest))


def plan_keys(layout: Layout) -> dict[str, object]:
    """The keys of `[plan]` that say this layout; what is a default is left out."""
    keys: dict[str, object] = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
    keys = {key: size for key, size in keys.items() if size != 1 or key == "dp"}
    keys["zero"] = layout.zero
    if layout.shard:
        keys["hsdp"] = layout.shard // layout.cp
    if layout.sequence_parallel:
        keys["sequence_parallel"] = True
    if layout.pp > 1:
        keys["schedule"] = layout.schedule
        if layout.chunks > 1:
            keys["chunks"] = layout.chunks
    if layout.cp > 1:
        keys["cp_kind"] = layout.cp_kind
    if layout.recompute != "none":
        keys["recompute"] = layout.recompute
    keys["micro_batch"] = layout.micro_batch
    keys["precision"] = layout.precision
    return keys


def why_not_trainable(work: Workload, layout: Layout) -> str:
    """Empty where training runs it; else what is missing."""
    if layout.precision not in ("bf16", "fp16", "fp32"):
        return f"precision {layout.precision} is not built in train"
    if layout.recompute == "half":
        return "recompute=half (every other product) is not built in train"
    if layout.half_layers:
        return "stages of half layers are not built in train"
    if layout.pipeline_inside:
        return "the rank order tp, pp, cp, dp is not built in train"
    if work.model.num_experts:
        return "experts are not built in train"
    return _refused(_smallest(layout))


def _smallest(layout: Layout) -> Layout:
    """The same plan on as few data-parallel ranks as have all that it has: how many there are changes nothing here, and
    a search asks of thousands."""
    shares = min(2, layout.shard // layout.cp)
    copies = min(2, layout.dp * layout.cp // layout.shard) if layout.shard else 1
    dp = shares * copies if layout.shard else min(2, layout.dp)
    return with_changes(layout, dp=dp, shard=shares * layout.cp, micro_batch=1)


@lru_cache(maxsize=10_000)
def _refused(layout: Layout) -> str:
    keys = plan_keys(layout)
    lacking = [key for key in keys if key not in _BUILT and key != "zero"]
    if lacking:
        return f"plan.{lacking[0]} is not built in train"
    request = PlanRequest(
        policy=layout.zero,
        recompute=parse_recompute(layout.recompute),
        **{key: value for key, value in keys.items() if key not in ("zero", "recompute")},  # type: ignore[arg-type]
    )
    try:
        make_plan(request, world_size=layout.num_devices, global_batch=2 * layout.dp)
    except MeshwrightError as error:
        return f"{error.code} {error.message.split('. ')[0]}"
    return ""
