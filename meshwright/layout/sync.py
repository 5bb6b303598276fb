"""Which algorithm carries out which collective, for each value of `plan.sync`, and which policies it serves.

Owns E221. The algorithms themselves stand in `exchange/`; their names here are checked against it by a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from meshwright.errors import PlanError
from meshwright.layout.policy import ShardingPolicy

# Collective to algorithm; `native` leaves everything to the transport.
SYNC_ALGORITHMS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "native": MappingProxyType({}),
        "ring": MappingProxyType({"all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring"}),
        "tree": MappingProxyType({"all_reduce": "tree", "reduce": "tree", "broadcast": "tree"}),
        "hierarchical": MappingProxyType({"all_reduce": "hierarchical"}),
    }
)


def collectives_of(policy: ShardingPolicy, *, has_copies: bool) -> set[str]:
    """What a policy asks of the network; `has_copies`: hsdp, which sums shards over copies."""
    found = {policy.last_microbatch or policy.gradient_ready, policy.before_use, policy.after_step} - {None}
    names = {str(name) for name in found}
    if policy.ownership == "whole":  # parts are whole parameters, which go to and come from their owner
        whole = {"reduce_scatter": "reduce", "all_gather": "broadcast"}
        names = {whole.get(name, name) for name in names}
    return names | ({"all_reduce"} if has_copies else set())


def check_sync(sync: str, policy: ShardingPolicy, *, has_copies: bool) -> None:
    """Raise E221 where `sync` has no algorithm for what `policy` asks for."""
    if sync == "native":
        return
    missing = sorted(collectives_of(policy, has_copies=has_copies) - SYNC_ALGORITHMS[sync].keys())
    if not missing:
        return
    serving = [
        name
        for name, algorithms in SYNC_ALGORITHMS.items()
        if name == "native" or collectives_of(policy, has_copies=has_copies) <= algorithms.keys()
    ]
    described = f"whole {policy.name}" if policy.ownership == "whole" else policy.name
    raise PlanError(
        "E221",
        f'plan.sync = "{sync}" has no {" and no ".join(missing)}, which {described} needs. '
        f"For {described}: plan.sync = {', '.join(serving)}; or take plan.zero=0 with {sync}.",
    )
