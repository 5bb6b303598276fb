"""The plan of a run: the value that the trainer runs, tests compare and files store."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.layout.policy import ShardingPolicy, find_policy
from meshwright.layout.recompute import NOTHING_AGAIN, RecomputePlan, parse_recompute
from meshwright.layout.sequence import DEFAULT_CP_KIND, CpKind
from meshwright.mesh import MeshSpec

Precision = Literal["fp64", "fp32", "bf16", "fp16"]
Offload = Literal["none", "optimizer"]
TransportName = Literal["auto", "gloo", "shm", "nccl"]


@dataclass(frozen=True)
class TrainPlan:
    """How one run is laid out; a layout changes speed and memory only, never the result.

    Attributes:
        mesh: the axes and their sizes.
        policy: what each rank keeps, and when it communicates.
        global_batch: samples a step, over all ranks and micro-steps.
        micro_batch: samples a rank and micro-step; where stages have unlike numbers of ranks, on those of the most.
        num_microbatches: micro-steps a step; global_batch = dp x micro_batch x num_microbatches.
        precision: element type of forward and backward; with 16 bits the optimizer's state, the masters it updates
            and sums of gradients are float32.
        offload: what lives in host memory: nothing, or the masters and the optimizer's state.
        sync: which algorithms carry out the collectives, a name of `layout/sync.py`.
        transport: what carries them; `auto` is NCCL between GPUs, shared memory between CPU processes of one host,
            else Gloo.
        recompute: what is computed again in backward instead of being kept.
        layout: pattern of module names and role of each kind of layer under tp; empty: by known names.
        sequence_parallel: whether tp ranks have a part of the tokens between the products that they share.
        servers: ranks behind those of the mesh that hold and update the parameters (sync `parameter_server`).
        staleness: steps that a worker may be ahead of the slowest; None: all make the same step together.
        cp_kind: how attention sees the whole sequence under cp.
        schedule: order of forwards and backwards over the stages of a pipeline, a name of `schedule/catalogue.py`.
        chunks: stages that a rank of a pipeline holds.
        stages: modules with which the stages of a pipeline begin, without the first; empty: balanced by cost.
    """

    mesh: MeshSpec
    policy: ShardingPolicy
    global_batch: int
    micro_batch: int
    num_microbatches: int
    precision: Precision = "fp32"
    offload: Offload = "none"
    sync: str = "native"
    transport: TransportName = "auto"
    recompute: RecomputePlan = NOTHING_AGAIN
    servers: int = 0
    staleness: int | None = None
    layout: tuple[tuple[str, str], ...] = ()
    sequence_parallel: bool = False
    cp_kind: CpKind = DEFAULT_CP_KIND
    schedule: str = "serial"
    chunks: int = 1
    stages: tuple[str, ...] = ()

    @property
    def num_stages(self) -> int:
        """Parts of the model along its depth."""
        return self.mesh.size("pp") * self.chunks

    @property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each place of a pipeline where their numbers are unlike; else empty."""
        return self.mesh.teams

    @property
    def world_size(self) -> int:
        """Number of processes: the ranks of the mesh and the servers."""
        return self.mesh.world_size + self.servers

    def describe(self) -> str:
        """Short text for people: `zero1x2 · micro 8 x accumulate 2 · fp32`; `2 copies of zero3x4`, `whole zero1x2`.

        With servers: `2 workers, 1 parameter server · micro ...`.
        """
        shard, copies = self.mesh.size("dp_shard", "cp"), self.mesh.size("dp_replicate")
        name = self.policy.name if shard == 1 else f"{self.policy.name}x{shard}"
        if self.stage_ranks:
            name = f"{self.policy.name}x" + "+".join(str(len(team)) for team in self.stage_ranks)
        name = f"whole {name}" if self.policy.ownership == "whole" else name
        name = f"{copies} copies of {name}" if copies > 1 else name
        tensor = f"tp{self.mesh.size('tp')}" + (" with sequence parallel" if self.sequence_parallel else "")
        name = f"{tensor} · {name}" if self.mesh.size("tp") > 1 else name
        name = f"cp{self.mesh.size('cp')} {self.cp_kind} · {name}" if self.mesh.size("cp") > 1 else name
        if self.mesh.size("pp") > 1:
            chunks = f" x {self.chunks} chunks" if self.chunks > 1 else ""
            name = f"pp{self.mesh.size('pp')}{chunks} {self.schedule} · {name}"
        if self.servers:
            name = f"{_number(shard, 'worker')}, {_number(self.servers, 'parameter server')}"
        parts = [name, f"micro {self.micro_batch} x accumulate {self.num_microbatches}", self.precision]
        parts += ["optimizer in host memory"] if self.offload == "optimizer" else []
        parts += [f"recompute {self.recompute}"] if self.recompute.is_active else []
        if self.staleness is not None:
            parts.append(f"staleness {self.staleness}")
        parts += [f"sync {self.sync}"] if self.sync != "native" and not self.servers else []
        return " · ".join([*parts, *([f"transport {self.transport}"] if self.transport != "auto" else [])])

    def to_json(self) -> str:
        """Stable JSON, the inverse of `from_json`."""
        value = dataclasses.asdict(self)
        value["mesh"] = {axis.name: axis.size for axis in self.mesh.axes}
        value["stage_ranks"] = self.stage_ranks
        value["recompute"] = self.recompute.to_value()
        return json.dumps(value, indent=1)

    @classmethod
    def from_json(cls, text: str) -> TrainPlan:
        """Rebuild a plan that `to_json` wrote."""
        value: dict[str, Any] = json.loads(text)
        teams, sizes = value.pop("stage_ranks", ()), value["mesh"]
        value["mesh"] = MeshSpec.of_teams(teams) if teams else MeshSpec.of(**sizes)
        value["recompute"] = parse_recompute(value.get("recompute", "none"))
        value["stages"] = tuple(value.get("stages", ()))
        value["layout"] = tuple((pattern, role) for pattern, role in value.get("layout", ()))
        value["policy"] = dataclasses.replace(find_policy(value["policy"]["name"]), **value["policy"])
        return cls(**value)


def _number(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")
