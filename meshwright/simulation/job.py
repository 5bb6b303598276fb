"""What is priced: a decoder transformer, its batch, and how a cluster carries it out. Numbers and words only.

Simplifications: stages hold equal numbers of layers (embedding and head count as one each where that divides);
rank order is tp, cp, dp, pp from the inside out, or tp, pp, cp, dp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from meshwright.errors import ConfigError
from meshwright.presets.host import HostProfile
from meshwright.presets.machines import Machine
from meshwright.presets.models import ModelPreset

Recompute = Literal["none", "selective", "half", "full"]
Attention = Literal["flash", "engine", "unfused"]
ContextKind = Literal["ring", "ulysses", "allgather"]
Schedule = Literal["serial", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe"]


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes.

    Attributes:
        machine: one device.
        num_devices: all of them.
        devices_per_node: that share the fast links.
        nic_bytes_per_second: network rate of a node's cards together, one direction.
        oversubscription: how many times less leaves a pod than enters its switches; 1: full.
        pod_devices: devices of a pod; 0: one pod.
        host: what was measured of this host, where the devices are processes of it; else formulas are taken.
    """

    machine: Machine
    num_devices: int
    devices_per_node: int
    nic_bytes_per_second: float
    oversubscription: float = 1.0
    pod_devices: int = 0
    host: HostProfile | None = None

    @property
    def num_nodes(self) -> int:
        """Nodes, the last one perhaps not full."""
        return -(-self.num_devices // self.devices_per_node)


def on_host(cluster: Cluster, host: HostProfile) -> Cluster:
    """The cluster as processes of hosts like the one that was measured, the memory of each shared evenly."""
    count = min(cluster.num_devices, cluster.devices_per_node)
    machine = replace(cluster.machine, memory_bytes=host.memory_bytes // count)
    return replace(cluster, machine=machine, host=host)


@dataclass(frozen=True)
class Workload:
    """Attributes: the model, tokens of a sequence, sequences of a step, whether attention is causal."""

    model: ModelPreset
    seq_len: int
    global_batch: int


@dataclass(frozen=True)
class Layout:
    """One way to carry a workload out.

    Attributes:
        dp, tp, pp, cp: sizes of the axes; their product is the number of devices.
        zero: what data-parallel ranks share: 0 nothing, 1 optimizer, 2 and gradients, 3 and weights.
        shard: ranks that share under `zero` (hsdp); 0: all of dp x cp.
        sequence_parallel: tp ranks cut the stream along the sequence between their layers.
        schedule, chunks: of the pipeline.
        recompute: what runs again in backward: attention's core (selective), half of the forward, or all of it.
        micro_batch: sequences of a rank and micro-step.
        precision: of products, "bf16", "fp16", "fp8", or "fp8-rows" (a scale for each row).
        attention: "flash" (portable fused kernels), "engine" (kernels for this generation of device), or "unfused":
            written out with its scores in memory.
        fused: whether elementwise operations run in few kernels (a compiler, or a library of fused layers).
        gradient_bytes: of one element in the reduction.
        accumulator_bytes: of one element of a second buffer of gradients, which sums over micro-steps.
        reduces_whole: whether zero1 sums gradients on all ranks, and not each part on its owner alone.
        optimizer_bytes: of one element's masters and moments, 16 where an update first copies its gradients in float32.
        bucket_bytes: buffers of a framework through which gradients and weights are exchanged.
        keeps_outputs: whether a stage keeps what it has sent until its backward.
        logit_bytes: of one logit and its gradient at the peak: 6 for a loss that works in place (16 bits and float32),
            14 for torch's own, which keeps two more in float32.
        overlap_gradients: whether reductions, and gathers of zero3, run beside computations.
        overlap_weights: whether the gather of new weights runs beside the next forward.
        overlap_tensor: whether tp's collectives run beside products, in pieces.
        cp_kind: how attention sees the whole sequence: keys and values go round, heads are exchanged for tokens, or all
            keys and values are gathered.
        pipeline_inside: whether the stages of a pipeline are neighbours and data-parallel ranks lie outside of them.
        joined_steps: whether a rank of the pipeline begins the next step while others end this one, its update being
            validated afterwards; else all wait for the norm of all gradients.
        half_layers: whether a stage may begin between attention and the feed-forward part.
        keeps: micro-batches that each stage of a searched schedule may hold, and holds; 0: what its schedule needs.
        keeps_gathered: whether products keep the whole inputs that sequence parallelism gathered for them, and not
            this rank's part, which would be gathered again.
        counts_head: whether stages are cut by cost, the head counted: each takes layers until it has its share.
        holds_stage: whether stages of a pipeline hold what zero3 gathers, and whole sums of gradients in float32, from
            the first micro-batch to the last.
        one_card: whether zero3's collectives between nodes go through one network card of a node at a time, where there
            is one for each device.
        blocking_launches: whether each launch of a kernel waits for its end (`CUDA_LAUNCH_BLOCKING=1`).
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    shard: int = 0
    sequence_parallel: bool = False
    schedule: Schedule = "1f1b"
    chunks: int = 1
    recompute: Recompute = "none"
    micro_batch: int = 1
    precision: str = "bf16"
    attention: Attention = "flash"
    fused: bool = True
    gradient_bytes: int = 4
    accumulator_bytes: int = 0
    reduces_whole: bool = False
    optimizer_bytes: int = 12
    bucket_bytes: int = 0
    keeps_outputs: bool = False
    logit_bytes: int = 6
    overlap_gradients: bool = True
    overlap_weights: bool = True
    overlap_tensor: bool = False
    cp_kind: ContextKind = "ring"
    pipeline_inside: bool = False
    half_layers: bool = False
    joined_steps: bool = False
    keeps: int = 0
    keeps_gathered: bool = False
    counts_head: bool = False
    holds_stage: bool = False
    one_card: bool = False
    blocking_launches: bool = False

    @property
    def num_devices(self) -> int:
        """Devices that the layout takes."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def num_shards(self) -> int:
        """Ranks over which `zero` cuts."""
        return self.shard or self.dp * self.cp


def with_changes(layout: Layout, **changes: object) -> Layout:
    """As `dataclasses.replace`, which would take most of a search's time: nothing is checked."""
    made = object.__new__(Layout)
    vars(made).update(vars(layout))
    vars(made).update(changes)
    return made


def data_stride(layout: Layout) -> int:
    """Distance in rank order of neighbours along cp and dp."""
    return layout.tp * (layout.pp if layout.pipeline_inside else 1)


def pipeline_stride(layout: Layout) -> int:
    """Distance in rank order of neighbouring stages."""
    return layout.tp * (1 if layout.pipeline_inside else layout.cp * layout.dp)


def num_microbatches(work: Workload, layout: Layout) -> int:
    """Micro-steps of a rank; a batch that does not divide takes one more for its rest."""
    return max(1, -(-work.global_batch // (layout.dp * layout.micro_batch)))


def check_job(work: Workload, layout: Layout, cluster: Cluster) -> None:
    """Raise what cannot be priced.

    Raises:
        ConfigError: E280 for degrees that do not fill the cluster, E281 for sizes that do not divide.
    """
    if layout.num_devices != cluster.num_devices:
        raise ConfigError(
            "E280",
            f"dp={layout.dp} x tp={layout.tp} x pp={layout.pp} x cp={layout.cp} = {layout.num_devices} devices, "
            f"the cluster has {cluster.num_devices}; leave plan.dp out, or make the product equal",
        )
    model = work.model
    for what, size, parts in (
        ("plan.tp", model.num_heads, layout.tp),
        ("plan.cp", work.seq_len, layout.cp),
    ):
        if size % parts:
            raise ConfigError(
                "E281", f"{what}={parts} does not divide {size}; take one of {_divisors(size, parts)}"
            )
    if layout.pp * layout.chunks > model.num_layers + 2:
        raise ConfigError(
            "E281",
            f"plan.pp={layout.pp} x chunks={layout.chunks} exceeds {model.num_layers} layers; take fewer",
        )


def _divisors(size: int, near: int) -> str:
    found = [part for part in range(1, min(size, 2 * near) + 1) if size % part == 0]
    return ", ".join(map(str, found[-6:]))
