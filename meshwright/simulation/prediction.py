"""One plan priced: step time and memory with their parts, as plain frozen data.

The one function that a search over plans needs is `predict`; what it computes of a layer is kept, so that plans that
share their layers cost tens of microseconds each.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from meshwright.presets.calibration import Calibration, calibration_of
from meshwright.simulation.host import host_step
from meshwright.simulation.host_peak import host_peak
from meshwright.simulation.job import Cluster, Layout, Workload, num_microbatches
from meshwright.simulation.peak import PeakBytes, peak_bytes
from meshwright.simulation.step import StepSeconds, model_flops, step_seconds

# What a driver keeps of nominal memory for itself.
_USABLE = 0.99
# What an allocator holds in pieces too small to serve, when a run fails: 1.15 of 29.97 GiB in
# NVIDIA/Megatron-LM#525; 0.2 to 1.4 GiB of the peaks of nanotron's runs.
_IN_PIECES = 0.03


@dataclass(frozen=True)
class Prediction:
    """What a plan will cost.

    Attributes:
        layout: the plan.
        num_microbatches: micro-steps of a rank.
        step: seconds, with parts.
        memory: bytes of the fullest rank, with parts.
        fits: whether they are less than the device has.
        mfu: FLOPs of the model (attention's whole square) over peak and time; None on hosts that were measured, whose
            peak is not known.
        hfu: the same with what runs again counted.
        tokens_per_second_per_device: of the whole job.
        is_fitted: whether the machine's constants come from its own runs.
    """

    layout: Layout
    num_microbatches: int
    step: StepSeconds
    memory: PeakBytes
    fits: bool
    mfu: float | None
    hfu: float | None
    tokens_per_second_per_device: float
    is_fitted: bool

    def to_json(self) -> dict[str, object]:
        """As one entry of a list of plans."""
        own = self.layout
        return {
            "mesh": {"pp": own.pp, "dp": own.dp, "cp": own.cp, "tp": own.tp},
            "zero": own.zero,
            "schedule": own.schedule,
            "chunks": own.chunks,
            "recompute": own.recompute,
            "sequence_parallel": own.sequence_parallel,
            "micro_batch": own.micro_batch,
            "num_microbatches": self.num_microbatches,
            "step_seconds": self.step.total,
            "step_parts": asdict(self.step),
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "memory_bytes": {**asdict(self.memory), "peak": self.memory.peak},
            "fits": self.fits,
            "calibrated": self.is_fitted,
        }


def predict(work: Workload, layout: Layout, cluster: Cluster, fit: Calibration | None = None) -> Prediction:
    """Price one plan; nothing is checked (see `check_job`).

    Args:
        work: the model and its batch.
        layout: the plan; its product is the cluster's devices.
        cluster: where.
        fit: constants other than the machine's own.
    """
    fit = fit or calibration_of(cluster.machine)
    host = cluster.host
    step = step_seconds(work, layout, cluster, fit) if host is None else host_step(work, layout, cluster)
    memory = peak_bytes(work, layout, cluster) if host is None else host_peak(work, layout, host)
    machine = cluster.machine
    peak = machine.flops.get("bf16") or machine.flops.get("fp16") or machine.flops["fp32"]
    mfu = None if host is not None else model_flops(work) / (step.total * cluster.num_devices * peak)
    again = {"none": 0.0, "selective": 0.0, "half": 0.5, "full": 1.0}[layout.recompute]
    return Prediction(
        layout=layout,
        num_microbatches=num_microbatches(work, layout),
        step=step,
        memory=memory,
        fits=memory.peak + _IN_PIECES * (memory.peak - memory.reserve) <= machine.memory_bytes * _USABLE,
        mfu=mfu,
        hfu=None if mfu is None else mfu * (1 + again / 3),
        tokens_per_second_per_device=work.global_batch * work.seq_len / step.total / cluster.num_devices,
        is_fitted=fit.fitted or host is not None,
    )


def percent_text(part: float | None) -> str:
    """A part of 1 for people; a dash where it is not known."""
    return "–" if part is None else f"{100 * part:.1f} %"
