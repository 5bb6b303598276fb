"""Which algorithm carries out which collective, for each value of `plan.sync`, and which policies it serves.

Owns E221 and E222. The algorithms themselves stand in `exchange/`; their names here are checked against it by a test.
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
        # Of the row that it puts in the place of ddp's; the small reduction of a step is the transport's.
        "parameter_server": MappingProxyType({"reduce": "parameter_server", "broadcast": "parameter_server"}),
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
    if sync == "parameter_server":
        _check_server_policy(policy)
        return
    missing = sorted(collectives_of(policy, has_copies=has_copies) - SYNC_ALGORITHMS[sync].keys())
    if not missing:
        return
    serving = [
        name
        for name, algorithms in SYNC_ALGORITHMS.items()
        if name == "native"
        or (name != "parameter_server" and collectives_of(policy, has_copies=has_copies) <= algorithms.keys())
    ]
    described = f"whole {policy.name}" if policy.ownership == "whole" else policy.name
    raise PlanError(
        "E221",
        f'plan.sync = "{sync}" has no {" and no ".join(missing)}, which {described} needs. '
        f"For {described}: plan.sync = {', '.join(serving)}; or take plan.zero=0 with {sync}.",
    )


def num_servers(sync: str, servers: int | None, staleness: int | None, *, world_size: int) -> int:
    """How many ranks are servers: 0 without a parameter server, 1 where their number is not given.

    Raises:
        PlanError: E222 for servers or staleness without a parameter server, and where no rank is left to work.
    """
    if sync != "parameter_server":
        for key, value in (("servers", servers), ("staleness", staleness)):
            if value is not None:
                raise PlanError(
                    "E222",
                    f'plan.{key} = {value} is for plan.sync = "parameter_server", and plan.sync is "{sync}". '
                    f'Set plan.sync="parameter_server", or leave plan.{key} out.',
                )
        return 0
    number = 1 if servers is None else servers
    if number >= world_size:
        raise PlanError(
            "E222",
            f"plan.servers = {number} of {world_size} processes leave no worker: a server computes no gradient. "
            f"Start at least {number + 1}, e.g. plan.processes={number + 1}.",
        )
    return number


def _check_server_policy(policy: ShardingPolicy) -> None:
    if policy.name in ("ddp", "parameter_server"):
        return
    raise PlanError(
        "E221",
        f'plan.sync = "parameter_server" keeps the optimizer on the servers, and plan.zero = {policy.name[-1]} on the '
        f"ranks that compute. Set plan.zero=0, or plan.sync=native with plan.zero={policy.name[-1]}.",
    )
