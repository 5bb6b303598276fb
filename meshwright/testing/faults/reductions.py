"""Silent faults of gradient reductions: missing, doubled, over the wrong ranks, scaled, too early, too coarse."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

import torch

from meshwright.comm.transports.base import Work
from meshwright.testing.faults.patching import (
    Clock,
    Issue,
    Message,
    Method,
    is_step,
    keep_own,
    on_agreement,
    on_reductions,
    patch,
    then,
    trained,
)
from meshwright.testing.faults.places import buckets
from meshwright.testing.faults.silent import SilentFault, Site
from meshwright.verification.rank import CandidateRank


def _no_gradient_reduction(candidate: CandidateRank, _site: Site) -> None:
    groups = candidate.engine.groups
    nobody = replace(groups, all=replace(groups.all, transport=None))
    for memory in trained(candidate):
        patch(memory, "start_reduction", lambda start: lambda _groups: start(nobody))


def _bucket_not_reduced(candidate: CandidateRank, site: Site) -> None:
    def act(message: Message, issue: Issue) -> Work:
        if message.name != site.place.name or candidate.state.step < site.step - 1:
            return issue()
        keep_own(message, candidate)
        return Work(())

    on_reductions(candidate, act)


def _step_not_reduced(candidate: CandidateRank, site: Site) -> None:
    def act(message: Message, issue: Issue) -> Work:
        if not is_step(candidate, site):
            return issue()
        keep_own(message, candidate)
        return Work(())

    on_reductions(candidate, act)


def _last_micro_step_not_reduced(candidate: CandidateRank, _site: Site) -> None:
    clock = Clock(candidate)

    def act(message: Message, issue: Issue) -> Work:
        if not clock.is_last:
            return issue()
        keep_own(message, candidate)
        return Work(())

    on_reductions(candidate, act)


def _reduced_twice(candidate: CandidateRank, site: Site) -> None:
    def act(message: Message, issue: Issue) -> Work:
        if message.name != site.place.name:
            return issue()
        return then(issue(), lambda: issue().wait())

    on_reductions(candidate, act)


def _reduced_over_pairs(candidate: CandidateRank, _site: Site) -> None:
    group = candidate.engine.group
    transport = group.transport
    assert transport is not None, f"group {group.axis} of one rank has no transport"

    def act(message: Message, _issue: Issue) -> Work:
        everyone = message.source.new_empty(group.size * message.source.numel())

        def sum_pair() -> None:
            rows = everyone.view(group.size, -1)
            first = group.index // 2 * 2
            message.output.copy_(rows[first : first + 2].sum(0))

        return then(transport.all_gather(everyone, message.source), sum_pair)

    on_reductions(candidate, act)


def _averaged_over_dp(candidate: CandidateRank, _site: Site) -> None:
    size = candidate.engine.group.size
    on_reductions(candidate, lambda message, issue: then(issue(), lambda: message.output.div_(size)))


def _contribution_scaled(candidate: CandidateRank, site: Site, factor: float) -> None:
    """The site's rank gives `factor` times its gradients of the site's bucket."""

    def act(message: Message, issue: Issue) -> Work:
        if message.name == site.place.name and candidate.rank == site.rank:
            message.source.mul_(factor)
        return issue()

    on_reductions(candidate, act)


def _contribution_lost(candidate: CandidateRank, site: Site) -> None:
    _contribution_scaled(candidate, site, 0.0)


def _contribution_twice(candidate: CandidateRank, site: Site) -> None:
    _contribution_scaled(candidate, site, 2.0)


def _read_before_reduced(candidate: CandidateRank, site: Site) -> None:
    def act(message: Message, issue: Issue) -> Work:
        if message.name != site.place.name or not is_step(candidate, site):
            return issue()
        local = message.output.new_empty(message.output.shape)
        keep_own(Message(message.name, local, message.source), candidate)
        half = slice(0, local.numel() // 2)

        def overwrite() -> None:
            message.output[half] = local[half]

        return then(issue(), overwrite)

    on_reductions(candidate, act)


def _reduced_in_bf16(candidate: CandidateRank, site: Site) -> None:
    def act(message: Message, issue: Issue) -> Work:
        if message.name == site.place.name:
            message.source.copy_(message.source.to(torch.bfloat16))
        return issue()

    on_reductions(candidate, act)


def _gradient_shards_swapped(candidate: CandidateRank, site: Site) -> None:
    ranks = candidate.engine.group.ranks
    pair = [ranks.index(site.rank), ranks.index(site.other)]

    def act(message: Message, issue: Issue) -> Work:
        if message.name == site.place.name:
            rows = message.source.view(len(ranks), -1)
            rows[pair] = rows[pair[::-1]]
        return issue()

    on_reductions(candidate, act)


def _gradients_not_cleared(candidate: CandidateRank, site: Site) -> None:
    def make(start: Method) -> Method:
        def keeping() -> None:
            kept = [(memory, set(memory.written)) for memory in candidate.engine.memories]
            start()
            if is_step(candidate, site):
                for memory, written in kept:
                    memory.written |= written
                    memory.shard_holds_sum = memory.sums_in_shard

        return keeping

    patch(candidate.engine, "start_step", make)


def _used_on_every_rank_only(candidate: CandidateRank, _site: Site) -> None:
    names, size = candidate.engine.parameter_names, candidate.engine.group.size
    counts: dict[str, float] = {}

    def act(message: Message, issue: Issue) -> Work:
        def count() -> None:
            counts.update(zip(names, message.output.tolist()[-len(names) :], strict=True))

        return then(issue(), count)

    on_agreement(candidate, act)

    def make(update: Method) -> Method:
        def updating(*, used: Set[str], **rest: Any) -> None:
            update(used={name for name in used if counts[name] == size}, **rest)

        return updating

    patch(candidate.state.optimizer, "step", make)


FAULTS = (
    SilentFault(
        name="no_gradient_reduction",
        theme="missing reduction",
        description="no rank reduces its gradients: each trains on its own samples, and replicas drift from step 1",
        source="volcengine/verl#7493",
        expected=("gradients",),
        inject=_no_gradient_reduction,
        needs=("2 ranks", "ddp"),
    ),
    SilentFault(
        name="bucket_not_reduced",
        theme="missing reduction",
        description="from some step on one bucket keeps the gradients of its own rank",
        source="NVIDIA/Megatron-LM#1446",
        expected=("gradients",),
        inject=_bucket_not_reduced,
        needs=("2 ranks",),
        places=buckets,
    ),
    SilentFault(
        name="step_not_reduced",
        theme="missing reduction",
        description="in one later step gradients are not reduced",
        source="pytorch/pytorch#187732",
        expected=("gradients",),
        inject=_step_not_reduced,
        needs=("2 ranks",),
        first_step=2,
    ),
    SilentFault(
        name="last_micro_step_not_reduced",
        theme="missing reduction",
        description="the reduction after the last micro-step of each step is left out",
        source="modelscope/FunASR#3472",
        expected=("gradients",),
        inject=_last_micro_step_not_reduced,
        needs=("2 ranks", "micro-steps", "gradient shards"),
    ),
    SilentFault(
        name="contribution_lost",
        theme="missing reduction",
        description="one rank gives zeros to the reduction of one bucket",
        source="EleutherAI/gpt-neox#1257",
        expected=("gradients",),
        inject=_contribution_lost,
        needs=("2 ranks",),
        places=buckets,
    ),
    SilentFault(
        name="reduced_twice",
        theme="doubled reduction",
        description="one bucket is reduced and then reduced again",
        source="pytorch/pytorch#160285",
        expected=("gradients",),
        inject=_reduced_twice,
        needs=("2 ranks", "ddp"),
        places=buckets,
    ),
    SilentFault(
        name="contribution_twice",
        theme="doubled reduction",
        description="one rank's gradients of one bucket count double",
        source="NVIDIA/Megatron-LM#7452",
        expected=("gradients",),
        inject=_contribution_twice,
        needs=("2 ranks",),
        places=buckets,
    ),
    SilentFault(
        name="reduced_over_pairs",
        theme="wrong group",
        description="gradients are summed over pairs of ranks instead of over all",
        source="NVIDIA/Megatron-LM#7452",
        expected=("gradients",),
        inject=_reduced_over_pairs,
        needs=("3 ranks", "ddp"),
    ),
    SilentFault(
        name="averaged_over_dp",
        theme="scale",
        description="the reduction divides by the number of ranks, and the global count already did",
        source="deepspeedai/DeepSpeed#5248",
        expected=("gradients",),
        inject=_averaged_over_dp,
        needs=("2 ranks",),
    ),
    SilentFault(
        name="read_before_reduced",
        theme="not awaited",
        description="in one step half of a bucket is read before the reduction has written it",
        source="deepspeedai/DeepSpeed#5545",
        expected=("gradients",),
        inject=_read_before_reduced,
        needs=("2 ranks",),
        places=buckets,
    ),
    SilentFault(
        name="reduced_in_bf16",
        theme="precision",
        description="one bucket is rounded to bfloat16 before it is reduced",
        source="deepspeedai/DeepSpeed#1800",
        expected=("gradients",),
        inject=_reduced_in_bf16,
        needs=("2 ranks",),
        places=buckets,
    ),
    SilentFault(
        name="gradient_shards_swapped",
        theme="swapped shards",
        description="two ranks get each other's part of a reduced bucket",
        source="pytorch/pytorch#129206",
        expected=("gradients",),
        inject=_gradient_shards_swapped,
        needs=("2 ranks", "optimizer shards"),
        places=buckets,
    ),
    SilentFault(
        name="gradients_not_cleared",
        theme="carried over",
        description="one step adds to the gradients that the step before has left",
        source="meta-pytorch/torchforge#71",
        expected=("gradients",),
        inject=_gradients_not_cleared,
        first_step=2,
    ),
    SilentFault(
        name="used_on_every_rank_only",
        theme="unused parameters",
        description="a parameter that one rank did not use is left out of the step on all",
        source="pytorch/pytorch#28294",
        expected=("gradients",),
        inject=_used_on_every_rank_only,
        needs=("2 ranks", "rare parameters"),
    ),
)
