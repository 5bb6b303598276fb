"""A MeshSpec bound to process groups: who this process is, and whom it talks to.

Reads the environment (ours, torchrun's, SLURM's), connects, and makes one group for each set of axes that is
asked for. Groups are passed to whoever needs them; nothing here is global except torch's own default group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from meshwright.comm.attempt import agree_on_attempt
from meshwright.comm.log import CommLog
from meshwright.comm.ops import DataGroups, Group, PipelineGroups, alone
from meshwright.comm.transports.base import Transport
from meshwright.comm.transports.exchange import Choice, ExchangeTransport
from meshwright.comm.transports.gloo import GlooTransport
from meshwright.comm.transports.nccl import NcclTransport
from meshwright.comm.transports.shared import SharedTransport
from meshwright.comm.transports.shared_connect import Refusal, SharedHost, share_memory
from meshwright.errors import PlanError, WorkerError
from meshwright.layout.plan import TrainPlan, TransportName
from meshwright.layout.sync import SYNC_ALGORITHMS
from meshwright.mesh import AXIS_NAMES, DATA_AXES, MeshSpec


@dataclass(frozen=True)
class World:
    """Who this process is among all of them.

    Attributes:
        rank: global rank.
        size: number of processes.
        local_rank: rank on this host.
        local_size: number of processes on a host; hosts with fewer come last.
        address: host of rank 0's store.
        port: its port.
        attempt: number of restarts that this host's launcher has counted; hosts of one job may count differently.
        source: `single`, `environment` (torchrun and our launcher) or `slurm`.
        store_exists: whether somebody else (torchrun's agent) already serves the store.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    attempt: int = 0
    source: Literal["single", "environment", "slurm"] = "single"
    store_exists: bool = False


def world_of(environment: Mapping[str, str]) -> World:
    """Read RANK, WORLD_SIZE ... (torchrun, our launcher) or SLURM_PROCID ... ; else one process."""
    get = environment.get
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return World(
            rank=int(environment["RANK"]),
            size=int(environment["WORLD_SIZE"]),
            local_rank=int(get("LOCAL_RANK", "0")),
            local_size=int(get("LOCAL_WORLD_SIZE", "1")),
            address=get("MASTER_ADDR", "127.0.0.1"),
            port=int(get("MASTER_PORT", "29500")),
            attempt=int(get("TORCHELASTIC_RESTART_COUNT", "0")),
            source="environment",
            store_exists=get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    if "SLURM_PROCID" in environment and int(get("SLURM_NTASKS", "1")) > 1:
        job = int(get("SLURM_JOB_ID", "0"))
        hosts = get("SLURM_STEP_NODELIST", get("SLURM_NODELIST", "127.0.0.1"))
        return World(
            rank=int(environment["SLURM_PROCID"]),
            size=int(environment["SLURM_NTASKS"]),
            local_rank=int(get("SLURM_LOCALID", "0")),
            local_size=int(get("SLURM_STEP_TASKS_PER_NODE", "1").split("(")[0].split(",")[0]),
            address=get("MASTER_ADDR", first_slurm_host(hosts)),
            # One port a job, the same on every node without asking anybody.
            port=int(get("MASTER_PORT", str(15000 + job % 20000))),
            attempt=int(get("SLURM_RESTART_COUNT", "0")),
            source="slurm",
        )
    return World()


def first_slurm_host(node_list: str) -> str:
    """First host of a SLURM node list: `gpu[03-07,12],login1` -> `gpu03`."""
    prefix, bracket, rest = node_list.partition("[")
    if not bracket or "," in prefix:
        return node_list.split(",")[0]
    first, closing, suffix = rest.partition("]")
    return prefix + first.split(",")[0].split("-")[0] + suffix.split(",")[0] if closing else node_list


def current_world() -> World:
    """The world of this process, from its environment."""
    return world_of(os.environ)


def connect(world: World, *, device: torch.device, timeout_seconds: float) -> None:
    """Join the process group of all ranks. One process alone connects to nobody.

    Raises:
        WorkerError: E403 when the port is taken or nobody answers.
    """
    if world.size == 1:
        return
    timeout = timedelta(seconds=timeout_seconds)
    try:
        server = world.rank == 0 and not world.store_exists
        store = dist.TCPStore(world.address, world.port, is_master=server, timeout=timeout)
        attempt = "only"
        if world.store_exists:
            # An agent's store outlives a failed attempt: without a prefix of their own, restarted ranks would read the
            # addresses of the dead ones (torch.distributed's env:// does, and fails most of the time).
            attempt = agree_on_attempt(
                dist.PrefixStore("meshwright", store),
                rank=world.rank,
                size=world.size,
                timeout_seconds=timeout_seconds,
            )
    except (RuntimeError, OSError) as error:
        raise WorkerError(
            "E403",
            f"cannot use port {world.port} of {world.address} (rank {world.rank} of {world.size}): "
            f"{str(error).splitlines()[0]}. Local runs pick a free port: unset MASTER_PORT, or set it to a "
            f"free one.",
        ) from error
    prefixed = dist.PrefixStore(f"meshwright/attempt-{attempt}", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=prefixed, rank=world.rank, world_size=world.size, timeout=timeout)


def is_connected() -> bool:
    """Whether this process has joined a process group."""
    return dist.is_initialized()


def disconnect() -> None:
    """Leave the process group, if any."""
    if is_connected():
        dist.destroy_process_group()


def share_values(value: Any) -> list[Any]:
    """What every rank of the process group has, in rank order; of one process alone, its own. Values must pickle."""
    if not is_connected():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def check_transport(transport: TransportName, device: torch.device) -> None:
    """Raise E224 where `transport` carries nothing between devices of this kind."""
    on_gpu = device.type == "cuda"
    if transport == "auto" or on_gpu == (transport == "nccl"):
        return
    what = "GPUs (cuda)" if on_gpu else "CPU processes"
    raise PlanError(
        "E224",
        f'plan.transport = "{transport}" carries nothing between {what}. Set plan.transport="auto", or '
        f"{'nccl' if on_gpu else 'gloo or shm'}.",
    )


class Mesh:
    """A MeshSpec bound to this process: its coordinates, and its groups.

    Args:
        spec: the axes; their product must be the world size.
        world: who this process is.
        log: where operations are recorded.
        device: where tensors live; decides the transport.
        axis_sets: groups to make, name to axes; every rank must ask for the same ones in the same order.
        sync: which algorithms carry out the collectives, as in `plan.sync`.
        transport: what carries them, as in `plan.transport`.
        servers: ranks behind those of the axes that hold parameters; they are in the group `dp` and at no
            coordinates. The workers alone are the group `workers`.

    Attributes:
        transport: what was asked for.
        warnings: W401 where ranks of one host could not share memory.
    """

    def __init__(  # noqa: PLR0913 - what a run may ask of its ranks
        self,
        spec: MeshSpec,
        world: World,
        *,
        log: CommLog,
        device: torch.device,
        axis_sets: Mapping[str, Sequence[str]] | None = None,
        sync: str = "native",
        transport: TransportName = "gloo",
        servers: int = 0,
    ) -> None:
        if spec.world_size + servers != world.size:
            sizes = " x ".join(f"{name} {size}" for name, size in spec.sizes().items())
            total = f"{sizes} = {spec.world_size}" + (f" and {servers} servers" if servers else "")
            raise PlanError("E200", f"{total}, but {world.size} processes started")
        self.spec = spec
        self.world = world
        self.rank = world.rank
        self.device = device
        self.log = log
        self.num_servers = servers
        self.coordinates = spec.coordinates(world.rank) if world.rank < spec.world_size else {}
        self._algorithms = SYNC_ALGORITHMS[sync]
        if self._algorithms and device.type != "cpu":
            raise PlanError(
                "E221",
                f'plan.sync = "{sync}" runs collectives over messages between CPU processes, and this rank computes on '
                f'{device}. Set plan.sync="native" on GPUs.',
            )
        check_transport(transport, device)
        self.transport = transport
        self._host = SharedHost(world.rank)
        self._sharing: list[SharedTransport] = []
        self.warnings: list[str] = []
        self._local_size = self._agreed_local_size() if self._algorithms else 1
        if servers:
            self._groups = self._server_groups()
            return
        sets = axis_sets or self._data_axes()
        self._groups = {name: self._make_group(name, axes) for name, axes in sets.items()}

    def close(self) -> None:
        """Take part no more: peers that still wait for this rank get an error. Not needed where a process ends."""
        for transport in self._sharing:
            transport.close()

    @classmethod
    def of_plan(cls, plan: TrainPlan, world: World, *, log: CommLog, device: torch.device) -> Mesh:
        """The mesh that `plan` asks for."""
        return cls(
            plan.mesh,
            world,
            log=log,
            device=device,
            sync=plan.sync,
            transport=plan.transport,
            servers=plan.servers,
        )

    def group(self, name: str) -> Group:
        """The group called `name`, e.g. `dp`: every rank over which a replicated gradient is summed."""
        return self._groups[name]

    def data_groups(self) -> DataGroups:
        """The data-parallel ranks as the mesh factors them: dp_replicate copies, each over dp_shard x cp ranks."""
        everyone = self.group("dp")
        if self.num_servers:
            groups = DataGroups.of(everyone)
            return replace(groups, computing=self.group("workers"), num_servers=self.num_servers)
        copies = self.spec.size("dp_replicate")
        if copies == 1:
            groups = DataGroups.of(everyone)
        elif copies == everyone.size:
            groups = DataGroups(everyone, alone("dp_shard", everyone), everyone)
        else:
            groups = DataGroups(everyone, self.group("dp_shard"), self.group("dp_replicate"))
        if self.spec.size("cp") > 1:
            groups = replace(groups, context=self.group("cp"))
        tensor = self.group("tp") if self.spec.size("tp") > 1 else None
        if self.spec.size("pp") == 1:
            return (
                groups
                if tensor is None
                else replace(groups, model=tensor, tensor=tensor, world=self.group("world"))
            )
        along = PipelineGroups(self.group("pp"), self.group("pp up"), self.group("pp down"), self.spec.teams)
        model = self.group("model") if tensor is not None else along.all
        return replace(groups, model=model, tensor=tensor, pipeline=along, world=self.group("world"))

    def _data_axes(self) -> dict[str, tuple[str, ...]]:
        copies, everyone = self.spec.size("dp_replicate"), self.spec.size(*DATA_AXES)
        sets: dict[str, tuple[str, ...]] = {"dp": DATA_AXES}
        if copies not in (1, everyone):
            shard = tuple(name for name in DATA_AXES if name != "dp_replicate")
            sets |= {"dp_shard": shard, "dp_replicate": ("dp_replicate",)}
        if self.spec.size("cp") > 1:
            sets |= {"cp": ("cp",)}
        if self.spec.size("tp") > 1:
            sets |= {"tp": ("tp",)}
        if self.spec.size("pp") > 1:
            sets |= {"pp": ("pp",), "pp up": ("pp",), "pp down": ("pp",)}
            if self.spec.size("tp") > 1:
                sets |= {"model": ("pp", "tp")}
        if self.spec.size("tp", "pp") > 1:
            sets |= {"world": AXIS_NAMES}
        return sets

    def _make_group(self, name: str, axes: Sequence[str]) -> Group:
        ranks = self.spec.peers(self.rank, axes)
        index = self.spec.index(self.rank, axes)
        own = name in ("pp up", "pp down")  # NCCL has a communicator a pair of ranks and group
        process_group = dist.group.WORLD
        if len(ranks) < self.spec.world_size or own:
            # Every rank makes every group, in the same order, those that it is not in as well: torch's rule.
            groups = [group for group in self.spec.groups(axes) if len(group) > 1]
            process_group = {group: dist.new_group(list(group)) for group in groups}.get(ranks)
        if len(ranks) == 1:
            return Group(name, ranks, 0, None, self.log)
        return Group(name, ranks, index, self._transport(process_group, ranks, index), self.log)

    def _server_groups(self) -> dict[str, Group]:
        """All ranks, whose sums go to servers and come from there, and the workers with the transport's own.

        By Gloo: a server waits for several workers at once, in threads that must not look for messages all the time.
        """
        workers, everyone = tuple(range(self.spec.world_size)), tuple(range(self.world.size))
        transport = self._transport(dist.group.WORLD, everyone, self.rank)
        together = Group("dp", everyone, self.rank, transport, self.log)
        process_group = dist.new_group(list(workers)) if len(workers) > 1 else None
        if self.rank in workers and process_group is not None:
            own = GlooTransport(process_group, self.rank, len(workers))
            return {"dp": together, "workers": Group("workers", workers, self.rank, own, self.log)}
        return {"dp": together, "workers": alone("workers", together)}

    def _transport(
        self, process_group: dist.ProcessGroup | None, ranks: tuple[int, ...], index: int
    ) -> Transport:
        assert process_group is not None, f"the group of ranks {ranks} has no process group: not connected"
        transport = self._make_transport(process_group, ranks, index)
        if not self._algorithms:
            return transport
        choice = Choice(self._algorithms, self._ranks_per_node(ranks), self.num_servers)
        return ExchangeTransport(transport, index, len(ranks), choice)

    def _make_transport(self, group: dist.ProcessGroup, ranks: tuple[int, ...], index: int) -> Transport:
        if self.device.type == "cuda":
            return NcclTransport(group, index, len(ranks))
        if self.transport in ("auto", "shm") and not self.num_servers:
            shared = share_memory(self._host, group, ranks, index)
            if isinstance(shared, SharedTransport):
                self._sharing.append(shared)
                return shared
            self._refused(shared)
        return GlooTransport(group, index, len(ranks))

    def _refused(self, refusal: Refusal) -> None:
        """Raise where shared memory was asked for; else say what it was that kept ranks of one host from it."""
        if self.transport == "shm":
            if refusal.error is not None:
                raise refusal.error
            raise PlanError(
                "E224",
                f'plan.transport = "shm" is for ranks that share memory. {refusal.text}. Set plan.transport="auto", '
                f"which takes Gloo there.",
            )
        if refusal.is_one_host:
            self.warnings.append(
                f"W401 ranks of this host do not share memory, and communicate by Gloo, several times slower. "
                f"{refusal.text}"
            )

    def _agreed_local_size(self) -> int:
        """The largest number of processes on a host.

        Hosts may run differently many, and ranks that cut a group into different nodes would run different programs.
        """
        if self.world.size == 1:
            return 1
        size = torch.tensor([self.world.local_size])
        dist.all_reduce(size, op=dist.ReduceOp.MAX)
        return int(size)

    def _ranks_per_node(self, ranks: tuple[int, ...]) -> int:
        """Neighbours of a group that share a host; 1 where they are spread."""
        hosts = [rank // self._local_size for rank in ranks]
        return max(1, hosts.count(hosts[0])) if hosts == sorted(hosts) else 1
