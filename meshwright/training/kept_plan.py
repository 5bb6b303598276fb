"""`plan.mode = "auto"` of a run that goes on: the plan of its checkpoint, as long as it still is one.

Owns when it is: as many processes, the same batch, and every key that the user fixes now. Without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from meshwright.checkpoint.folder import find_checkpoints, read_manifest
from meshwright.errors import CheckpointError
from meshwright.layout.plan import TrainPlan
from meshwright.training.config import RunConfig
from meshwright.training.deciding import Decision, fixed_keys

_ZERO = MappingProxyType({"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3})


def kept_plan(config: RunConfig, place: Path, *, world_size: int) -> Decision | None:
    """The plan of the newest checkpoint at `place`; None where there is none, or the run asks for another one.

    Args:
        config: of the run that goes on.
        place: a checkpoint, or a folder of checkpoints or runs.
        world_size: number of processes.
    """
    for path in find_checkpoints(place):
        try:
            plan = TrainPlan.from_json(json.dumps(read_manifest(path).run.plan))
        except (CheckpointError, KeyError, TypeError, ValueError):
            continue  # damaged, or of another version: whoever loads it says so
        keys = _keys_of(plan)
        fixed = fixed_keys(config.plan)
        wanted = {key: value for key, value in fixed.items() if key in keys}
        same = plan.world_size == world_size and plan.global_batch == config.train.global_batch
        inside = (plan.mesh.size("tp"), plan.mesh.size("cp")) == (config.plan.tp, config.plan.cp)
        if not same or not inside or any(keys[key] != value for key, value in wanted.items()):
            return None
        open_keys = {key: value for key, value in keys.items() if key not in fixed}
        why = f"kept from {path.name}"
        line = f"auto   {plan.describe()}   {why}: as many processes, the same batch"
        return Decision(open_keys, dict.fromkeys(open_keys, why), (line,), None, ())
    return None


def _keys_of(plan: TrainPlan) -> Mapping[str, object]:
    """What is decided of a plan, as keys of `[plan]`."""
    keys: dict[str, object] = {
        "pp": plan.mesh.size("pp"),
        "dp": plan.mesh.dp,
        "micro_batch": plan.micro_batch,
        "zero": _ZERO[plan.policy.name],
    }
    if plan.mesh.size("pp") > 1:
        keys |= {"schedule": plan.schedule, "chunks": plan.chunks}
        keys |= {"stages": plan.stages} if plan.stages else {}
        keys |= {"stage_ranks": plan.stage_ranks} if plan.stage_ranks else {}
    return keys
