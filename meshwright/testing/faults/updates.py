"""Silent faults of the optimizer: its parameters, state, learning rate and decay, and weights on their way to ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.transports.base import Work
from meshwright.testing.faults.patching import (
    Issue,
    Message,
    Method,
    after,
    is_step,
    on_gathers,
    patch,
    then,
)
from meshwright.testing.faults.places import (
    alike_parameters,
    frozen_parameters,
    gathered_buckets,
    matrices,
    memory_of,
    parameters,
    shards_of,
    vectors,
)
from meshwright.testing.faults.silent import SilentFault, Site
from meshwright.verification.rank import CandidateRank

_MOMENTS = ("exp_avg", "exp_avg_sq")


def _update_not_written_back(candidate: CandidateRank, site: Site) -> None:
    def make(update: Method) -> Method:
        def stale(**arguments: Any) -> None:
            shards = shards_of(candidate, site.place.name) if candidate.rank == site.rank else []
            before = [shard.parameter.detach().clone() for shard in shards]
            update(**arguments)
            if candidate.state.step >= site.step - 1:
                for shard, values in zip(shards, before, strict=True):
                    shard.parameter.detach().copy_(values)

        return stale

    patch(candidate.state.optimizer, "step", make)


def _update_skipped(candidate: CandidateRank, site: Site) -> None:
    def make(update: Method) -> Method:
        def skipping(**arguments: Any) -> None:
            if not (is_step(candidate, site) and candidate.rank == site.rank):
                update(**arguments)

        return skipping

    patch(candidate.state.optimizer, "step", make)


def _rate_of_another_step(candidate: CandidateRank, site: Site) -> None:
    def make(update: Method) -> Method:
        def slower(*, lr: float, **rest: Any) -> None:
            update(lr=lr / 2 if is_step(candidate, site) else lr, **rest)

        return slower

    patch(candidate.state.optimizer, "step", make)


def _decay(candidate: CandidateRank, *, of_matrices: bool, change: Callable[[float], float]) -> None:
    """Change the weight decay of matrices, or of vectors, by the decay of matrices."""
    optimizer = candidate.state.optimizer.torch_optimizer
    groups = optimizer.param_groups if optimizer is not None else []
    rate = max((group["weight_decay"] for group in groups), default=0.0) or _DECAY
    dims = {shard.parameter: len(shard.shape) for shard in candidate.engine.shards}
    for group in groups:
        if (dims[group["params"][0]] >= 2) == of_matrices:
            group["weight_decay"] = change(rate)


_DECAY = 0.1  # on a rank that owns vectors only, nothing says what matrices decay by


def _vectors_decay(candidate: CandidateRank, _site: Site) -> None:
    _decay(candidate, of_matrices=False, change=lambda rate: rate)


def _matrices_do_not_decay(candidate: CandidateRank, _site: Site) -> None:
    _decay(candidate, of_matrices=True, change=lambda _rate: 0.0)


def _frozen_parameter_decays(candidate: CandidateRank, site: Site) -> None:
    parameter = candidate.engine.model.get_parameter(site.place.name)

    def decay() -> None:
        parameter.detach().mul_(1 - 1e-4)

    after(candidate.engine, "finish_step", decay)


def _states(candidate: CandidateRank, name: str) -> Iterator[dict[str, Tensor]]:
    """Optimizer state of this rank's pieces of a parameter."""
    optimizer = candidate.state.optimizer.torch_optimizer
    if optimizer is not None:
        for shard in shards_of(candidate, name):
            yield optimizer.state[shard.parameter]


def _step_not_counted(candidate: CandidateRank, site: Site) -> None:
    def undo() -> None:
        if is_step(candidate, site) and candidate.rank == site.rank:
            for state in _states(candidate, site.place.name):
                state["step"].sub_(1)

    after(candidate.engine, "finish_step", undo)


def _counts_micro_steps(candidate: CandidateRank, _site: Site) -> None:
    def count() -> None:
        for name in {shard.name for shard in candidate.engine.shards}:
            for state in _states(candidate, name):
                if state:  # none where no gradient came yet
                    state["step"].add_(candidate.num_microbatches - 1)

    after(candidate.engine, "finish_step", count)


def _moments_dropped(candidate: CandidateRank, site: Site) -> None:
    def drop() -> None:
        if is_step(candidate, site) and candidate.rank == site.rank:
            for state in _states(candidate, site.place.name):
                for moment in _MOMENTS:
                    state[moment].zero_()

    after(candidate.engine, "finish_step", drop)


def _moments_swapped(candidate: CandidateRank, site: Site) -> None:
    def swap() -> None:
        if is_step(candidate, site) and candidate.rank == site.rank:
            first, second = (next(_states(candidate, name)) for name in site.place.tensors)
            for moment in _MOMENTS:
                first[moment], second[moment] = second[moment], first[moment]

    after(candidate.engine, "finish_step", swap)


# Weights on their way.


def _initial_values_by_rank(candidate: CandidateRank, site: Site) -> None:
    if candidate.rank != site.rank:
        return
    memory = memory_of(candidate, site.place.name)
    noise = torch.Generator().manual_seed(site.rank)
    for piece in memory.pieces():
        if piece.name == site.place.name:
            values = memory.weight_shard[piece.offset : piece.offset + piece.stop - piece.start]
            values.add_(0.01 * torch.randn(values.shape, generator=noise).to(values))


def _gather_reversed(candidate: CandidateRank, site: Site) -> None:
    size = candidate.engine.group.size

    def act(message: Message, issue: Issue) -> Work:
        rows = message.output.view(size, -1)

        def reverse() -> None:
            rows.copy_(rows.flip(0))

        return then(issue(), reverse) if is_step(candidate, site) else issue()

    on_gathers(candidate, act)


def _change_rows(candidate: CandidateRank, site: Site, change: Callable[[Tensor, Tensor], None]) -> None:
    """Let `change(rows, rows before the gather)` work on the site's bucket, on its rank and in its step."""
    size = candidate.engine.group.size

    def act(message: Message, issue: Issue) -> Work:
        if message.name != site.place.name or candidate.rank != site.rank or not is_step(candidate, site):
            return issue()
        rows = message.output.view(size, -1)
        before = rows.clone()
        return then(issue(), lambda: change(rows, before))

    on_gathers(candidate, act)


def _shards_swapped(candidate: CandidateRank, site: Site) -> None:
    ranks = candidate.engine.group.ranks
    pair = [ranks.index(site.rank), ranks.index(site.other)]

    def swap(rows: Tensor, _before: Tensor) -> None:
        rows[pair] = rows[pair[::-1]]

    _change_rows(candidate, site, swap)


def _others(candidate: CandidateRank) -> list[int]:
    group = candidate.engine.group
    return [index for index in range(group.size) if index != group.index]


def _update_not_received(candidate: CandidateRank, site: Site) -> None:
    others = _others(candidate)

    def keep(rows: Tensor, before: Tensor) -> None:
        rows[others] = before[others]

    _change_rows(candidate, site, keep)


def _gather_not_awaited(candidate: CandidateRank, site: Site) -> None:
    others = _others(candidate)

    def empty(rows: Tensor, _before: Tensor) -> None:
        rows[others] = 0.0

    _change_rows(candidate, site, empty)


def _stale_gather(candidate: CandidateRank, site: Site) -> None:
    kept: list[Tensor] = []

    def act(message: Message, issue: Issue) -> Work:
        if message.name != site.place.name or candidate.rank != site.rank:
            return issue()
        if candidate.state.step == site.step - 2:
            return then(issue(), lambda: kept.append(message.output.clone()))
        if is_step(candidate, site):
            return then(issue(), lambda: message.output.copy_(kept[-1]))
        return issue()

    on_gathers(candidate, act)


FAULTS = (
    SilentFault(
        name="update_not_written_back",
        theme="stale parameter",
        description="from some step on the optimizer updates a copy of one parameter that nobody reads",
        source="pytorch/pytorch#149205",
        expected=("parameters",),
        inject=_update_not_written_back,
        places=parameters,
    ),
    SilentFault(
        name="update_skipped",
        theme="replica drift",
        description="one rank leaves out the update of one step",
        source="pytorch/pytorch#136009",
        expected=("parameters",),
        inject=_update_skipped,
    ),
    SilentFault(
        name="rate_of_another_step",
        theme="learning rate",
        description="one step is made with half the learning rate, as of a schedule that is stepped once a rank",
        source="huggingface/transformers#24088",
        expected=("parameters",),
        inject=_rate_of_another_step,
    ),
    SilentFault(
        name="vectors_decay",
        theme="weight decay",
        description="weight decay is applied to norms and biases",
        source="verl-project/verl#5070",
        expected=("parameters",),
        inject=_vectors_decay,
        needs=("decoupled decay",),
        places=vectors,
    ),
    SilentFault(
        name="matrices_do_not_decay",
        theme="weight decay",
        description="matrices are taken for vectors because their shards have one dim, and do not decay",
        source="pytorch/pytorch#101343",
        expected=("parameters",),
        inject=_matrices_do_not_decay,
        needs=("decoupled decay",),
        places=matrices,
    ),
    SilentFault(
        name="frozen_parameter_decays",
        theme="frozen parameters",
        description="weight decay goes on for a parameter that is not trained",
        source="iamwangyabin/S-Prompts#2",
        expected=("parameters",),
        inject=_frozen_parameter_decays,
        needs=("frozen parameters", "whole weights"),
        places=frozen_parameters,
    ),
    SilentFault(
        name="step_not_counted",
        theme="optimizer state",
        description="the step count of one parameter stands still once on one rank",
        source="deepspeedai/DeepSpeed#7819",
        expected=("parameters", "optimizer"),
        inject=_step_not_counted,
        needs=("adam",),
        places=parameters,
    ),
    SilentFault(
        name="bias_correction_counts_micro_steps",
        theme="optimizer state",
        description="Adam counts micro-steps instead of steps",
        source="deepspeedai/DeepSpeed#8443",
        expected=("parameters", "optimizer"),
        inject=_counts_micro_steps,
        needs=("adam", "micro-steps"),
    ),
    SilentFault(
        name="moments_dropped",
        theme="optimizer state",
        description="one rank loses the moments of one parameter after some step",
        source="inclusionAI/AReaL#1468",
        expected=("parameters", "optimizer"),
        inject=_moments_dropped,
        needs=("adam",),
        places=parameters,
    ),
    SilentFault(
        name="moments_swapped",
        theme="optimizer state",
        description="on one rank two parameters of one shape have each other's moments",
        source="facebookresearch/fairscale#380",
        expected=("parameters", "optimizer"),
        inject=_moments_swapped,
        needs=("adam",),
        places=alike_parameters,
    ),
    SilentFault(
        name="initial_values_by_rank",
        theme="initialisation",
        description="one rank draws the first values of one parameter by a seed of its own",
        source="facebookresearch/detr#544",
        expected=("parameters",),
        inject=_initial_values_by_rank,
        places=parameters,
    ),
    SilentFault(
        name="gather_reversed",
        theme="swapped shards",
        description="in one step gathered shards lie in reversed order",
        source="pytorch/pytorch#129206",
        expected=("parameters", "activations"),
        inject=_gather_reversed,
        needs=("2 ranks", "optimizer shards"),
        first_step=2,
    ),
    SilentFault(
        name="shards_swapped",
        theme="swapped shards",
        description="in one step one rank has two gathered shards of a bucket in each other's place",
        source="pytorch/pytorch#102280",
        expected=("parameters", "activations"),
        inject=_shards_swapped,
        needs=("2 ranks", "optimizer shards"),
        places=gathered_buckets,
        first_step=2,
    ),
    SilentFault(
        name="update_not_received",
        theme="stale weights",
        description="in one step one rank keeps the old weights of a bucket, but for those that it updates",
        source="lodestone-rock/RamTorch#13",
        expected=("replicas", "activations"),
        inject=_update_not_received,
        needs=("2 ranks", "gathered updates"),
        places=gathered_buckets,
    ),
    SilentFault(
        name="stale_gather",
        theme="stale weights",
        description="in one step one rank computes with a bucket's weights of the step before",
        source="deepspeedai/DeepSpeed#8486",
        expected=("activations",),
        inject=_stale_gather,
        needs=("2 ranks", "weight shards"),
        places=gathered_buckets,
        first_step=2,
    ),
    SilentFault(
        name="gather_not_awaited",
        theme="not awaited",
        description="in one step one rank reads a bucket's weights while the others' shards are on their way",
        source="deepspeedai/DeepSpeed#2867",
        expected=("activations",),
        inject=_gather_not_awaited,
        needs=("2 ranks", "weight shards"),
        places=gathered_buckets,
        first_step=2,
    ),
)
