"""What a run says of itself before it starts and when it ends: one place for the sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.comm.ops import DataGroups
from meshwright.layout.accounting import owner_imbalance
from meshwright.layout.bucket import Unit
from meshwright.layout.plan import TrainPlan
from meshwright.layout.policy import Ownership
from meshwright.mesh import AXIS_CUTS
from meshwright.training.loss_scale import LossScale
from meshwright.training.metrics import StepRecord

_MIB = 2**20


def axes_lines(plan: TrainPlan, shape: Mapping[str, int]) -> list[str]:
    """What pp, dp, cp and tp cut of an activation (layer, batch, sequence, channel), with this run's numbers."""
    extents = {"batch": plan.micro_batch * plan.mesh.dp, **shape}
    parts = []
    for axis, size in plan.mesh.sizes().items():
        dim = AXIS_CUTS[axis]
        whole = extents.get(dim)
        numbers = f"{whole} / {size} = {whole // size}" if whole else f"/ {size}"
        parts.append(f"{axis} cuts {dim} {numbers}")
    return ["axes   an activation is (layer, batch, sequence, channel): " + " · ".join(parts)]


def plan_lines(plan: TrainPlan) -> list[str]:
    """The batch arithmetic and the policy."""
    policy = plan.policy
    verbs = [
        f"{moment}: {_verb(verb, policy.ownership)}"
        for moment, verb in (
            ("before use", policy.before_use),
            ("gradient ready", policy.gradient_ready if policy.shards_gradients else None),
            ("last micro-batch", policy.last_microbatch),
            ("after step", policy.after_step),
        )
        if verb
    ]
    if plan.mesh.size("dp_replicate") > 1:
        verbs.append("between copies once a step: all-reduce of shards")
    if plan.staleness is not None:
        verbs = ["after each worker's own step: push to servers, pull from servers"]
    dp, micro, k = plan.mesh.dp, plan.micro_batch, plan.num_microbatches
    return [
        f"plan   {plan.describe()}   ({' · '.join(verbs)})",
        f"check  {plan.global_batch} samples = dp {dp} x micro {micro} x accumulate {k} ✓",
    ]


def _verb(verb: str, ownership: Ownership) -> str:
    whole = {"all_gather": "broadcast from owners", "reduce_scatter": "reduce to owners"}
    return whole[verb] if ownership == "whole" and verb in whole else verb.replace("_", "-")


def owners_line(units: Sequence[Unit], groups: DataGroups) -> str:
    """How evenly whole parameters are spread over their owners: all ranks of a copy, or the servers."""
    first, who = (groups.num_workers, "servers") if groups.num_servers else (0, "ranks")
    num_owners = units[0].buckets[0].num_shards - first
    imbalance = owner_imbalance(units, first_owner=first)
    return f"owners {num_owners} {who} own whole parameters; the largest owns {imbalance:.3f} x the mean"


def skipped_line(step: int, scale: LossScale) -> str:
    """A step that was left out; `scale` is what follows it."""
    return (
        f"skip   step {step}: fp16 gradients overflowed, no update; loss scale {2 * scale.value:,.0f} → "
        f"{scale.value:,.0f} ({scale.skipped} skipped so far)"
    )


def step_line(record: StepRecord, total: int | None) -> str:
    """One step as `key=value`."""
    parts = [
        f"step={record.step}" + (f"/{total}" if total else ""),
        f"loss={record.loss:.4f}",
        f"lr={record.lr:.2e}",
        "skipped" if record.grad_norm is None else f"gnorm={record.grad_norm:.3f}",
        f"tok_s={record.tokens_per_second:,.0f}".replace(",", "_"),
        f"s={record.seconds:.3f}",
    ]
    if record.mfu is not None:
        parts.append(f"mfu={record.mfu:.3f}")
    if record.eval_loss is not None:
        parts.append(f"eval_loss={record.eval_loss:.4f}")
    return " ".join(parts)


def end_line(step: int, losses: Sequence[float], eval_loss: float | None, *, seconds: float) -> str:
    """The last word about steps: losses of this process's first and last, held-out loss, seconds a step."""
    if not losses:
        return f"done   {step} steps   none of them now"
    held = "" if eval_loss is None else f"   held-out loss {eval_loss:.4f}"
    return f"done   {step} steps   loss {losses[0]:.4f} → {losses[-1]:.4f}{held}   {seconds:.3f} s a step"


def control_line(losses: Mapping[str, float]) -> str:
    """The control: last tokens from their context, `ordered` and `shuffled`."""
    return (
        f"control last token {losses['ordered']:.4f} from its context, {losses['shuffled']:.4f} from the same "
        f"tokens shuffled: {losses['shuffled'] - losses['ordered']:+.4f}"
    )


def mfu_line(mfu: float, causal: float, peak: str, *, on_gpu: bool) -> str:
    """Utilisation, counted in the two ways that are common."""
    text = f"mfu    {mfu:.1%} with full attention, {causal:.1%} with causal, of {peak}"
    return text + ("; above 30% is good and above 40% excellent on accelerators" if on_gpu else "")
