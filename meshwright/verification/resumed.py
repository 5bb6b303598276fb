"""The check `resume`: another layout goes on from the candidate's checkpoint, and must still be the reference.

Owns which layout that is and what its reports are held against. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.layout.plan import TrainPlan
from meshwright.layout.policy import Ownership, find_policy
from meshwright.mesh import MeshSpec
from meshwright.verification.job import RankReport, Reference, VerifyJob
from meshwright.verification.judge import judge
from meshwright.verification.result import RESUME_CHECK, Check
from meshwright.verification.signatures import Sizes

# What ranks communicate, and which names are one tensor, says nothing of a checkpoint.
_NOT_ASKED = ("counts", "ties")
_CAUSE = "the run itself is right: what was saved, or what was loaded, is not"


def resumed_job(job: VerifyJob) -> VerifyJob:
    """The same comparison on another number of ranks with another policy, and without the fault."""
    plan, optimizer = job.plan, job.config.train.optimizer.name
    ranks = plan.mesh.dp
    samples = plan.global_batch // plan.num_microbatches
    other = ranks // 2 if ranks > 1 else min(2, samples)
    name = "zero1" if plan.policy.name == "zero3" else "zero3"
    ownership: Ownership = "whole" if optimizer == "muon" else "flat"
    policy = find_policy(name, bucket_bytes=plan.policy.bucket_bytes, ownership=ownership)
    tp = max(1, plan.mesh.size("tp") - 1)  # fewer are legal wherever more are
    pp = max(1, plan.mesh.size("pp") - 1)
    changed: TrainPlan = replace(
        plan,
        mesh=MeshSpec.of(pp=pp, dp_shard=other, tp=tp),
        schedule="1f1b" if pp > 1 else "serial",
        chunks=1,
        stages=(),
        policy=policy,
        micro_batch=-(-samples // other),
        sequence_parallel=plan.sequence_parallel and tp > 1,
    )
    if plan.servers:
        changed = replace(changed, sync="native", servers=0)
    return replace(job, plan=changed, inject=None)


def resume_check(
    saved: VerifyJob, resumed: VerifyJob, reference: Reference, ranks: Sequence[RankReport], *, after: int
) -> Check:
    """Everything that `ranks` measured after they had loaded what was saved after step `after`, as one check."""
    recorded = tuple(
        item
        for item in reference.recorded
        if item.step > after or (item.step == after and item.check == "parameters")
    )
    samples = {place: found for place, found in reference.samples.items() if place[0] > after}
    plan = resumed.plan
    sizes = Sizes(plan.mesh.dp, plan.num_microbatches, saved.steps, plan.policy.name)
    part = replace(reference, recorded=recorded, samples=samples)
    checks = [check for check in judge(part, ranks, sizes) if check.name not in _NOT_ASKED]
    wrongs = [check.first_wrong for check in checks if check.first_wrong is not None]
    first = min(wrongs, key=lambda wrong: wrong.sort_key, default=None)
    worst = max(checks, key=lambda check: check.worst_relative)
    words = [f"{job.plan.policy.name} on {job.plan.mesh.dp}" for job in (saved, resumed)]
    return Check(
        name=RESUME_CHECK,
        ok=first is None,
        compared=sum(check.compared for check in checks),
        num_wrong=sum(check.num_wrong for check in checks),
        worst_relative=worst.worst_relative,
        worst_tensor=worst.worst_tensor,
        first_wrong=replace(first, cause=_CAUSE) if first else None,
        note=f"saved by {words[0]} after step {after}, loaded by {words[1]}",
    )
