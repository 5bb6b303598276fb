"""Silent faults of what is summed over micro-steps and what sums are divided by: scale, order, rounding, loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.transports.base import Work
from meshwright.testing.faults.patching import (
    LOSS_SUM,
    Agreement,
    Clock,
    Issue,
    Message,
    Method,
    after,
    before,
    is_step,
    on_agreement,
    own_sum,
    patch,
    then,
    trained,
)
from meshwright.testing.faults.places import buckets, memory_of, parameters
from meshwright.testing.faults.silent import SilentFault, Site
from meshwright.verification.rank import CandidateRank

_IGNORED = -100


def _sum_decays(candidate: CandidateRank, _site: Site) -> None:
    clock = Clock(candidate)

    def decay() -> None:
        if clock.microbatch >= 0:  # the clock advances after this
            for memory in trained(candidate):
                own_sum(memory).div_(candidate.num_microbatches)

    before(candidate.engine, "start_microbatch", decay)


def _overwritten(candidate: CandidateRank, site: Site) -> None:
    memory = next(m for m in trained(candidate) if m.bucket.name == site.place.name)

    def forget() -> None:
        memory.written.clear()
        memory.shard_holds_sum = False

    before(candidate.engine, "start_microbatch", forget)


def _parameter_overwritten(candidate: CandidateRank, site: Site) -> None:
    memory = memory_of(candidate, site.place.name)
    position = [spec.name for spec in memory.bucket.parameters].index(site.place.name)
    before(candidate.engine, "start_microbatch", lambda: memory.written.discard(position))


def _reduced_before_accumulated(candidate: CandidateRank, _site: Site) -> None:
    clock = Clock(candidate)
    transport = candidate.engine.group.transport
    assert transport is not None, "several ranks have a transport"

    def reduce() -> None:
        if clock.microbatch == 0:
            for memory in trained(candidate):
                transport.all_reduce(own_sum(memory)).wait()

    after(candidate.engine, "finish_microbatch", reduce)


def _accumulated_in_bf16(candidate: CandidateRank, site: Site) -> None:
    clock = Clock(candidate)
    memory = next(m for m in trained(candidate) if m.bucket.name == site.place.name)

    def round_sum() -> None:
        if not clock.is_last:
            own_sum(memory).copy_(own_sum(memory).to(torch.bfloat16))

    after(candidate.engine, "finish_microbatch", round_sum)


def _sum_not_divided(candidate: CandidateRank, _site: Site) -> None:
    agreement = Agreement(candidate)

    def make(scale: Method) -> Method:
        return lambda factor: scale(factor * agreement.count)

    patch(candidate.engine, "scale_gradients", make)


def _normaliser_of_previous_step(candidate: CandidateRank, site: Site) -> None:
    agreement = Agreement(candidate)

    def make(scale: Method) -> Method:
        return lambda factor: scale(factor / agreement.correction if is_step(candidate, site) else factor)

    patch(candidate.engine, "scale_gradients", make)


# Losses.

LossFunction = Callable[[Any, Any], tuple[Tensor, Any]]


def _change_loss(
    candidate: CandidateRank, change: Callable[[LossFunction, Any, Any], tuple[Tensor, Any]]
) -> None:
    """Replace the loss by `change(loss, model, batch)`."""
    plain = candidate.loss
    candidate.loss = lambda model, batch: change(plain, model, batch)


def _with_gradient(total: Tensor, factor: float) -> Tensor:
    """`total` with `factor` times its gradient."""
    return total.detach() + factor * (total - total.detach())


def _divided_by_micro_steps(candidate: CandidateRank, _site: Site) -> None:
    def change(loss: LossFunction, model: Any, batch: Any) -> tuple[Tensor, Any]:
        total, count = loss(model, batch)
        return _with_gradient(total, 1 / candidate.num_microbatches), count

    _change_loss(candidate, change)


def _last_backward_missing(candidate: CandidateRank, site: Site) -> None:
    clock = Clock(candidate)

    def change(loss: LossFunction, model: Any, batch: Any) -> tuple[Tensor, Any]:
        total, count = loss(model, batch)
        lost = clock.is_last and candidate.rank == site.rank
        return _with_gradient(total, 0.0) if lost else total, count

    _change_loss(candidate, change)


def labels_of(batch: Any) -> tuple[str, Tensor]:
    """Name and values of the labels in a batch that is a dict."""
    return next((name, value) for name, value in batch.items() if name.startswith("label"))


def _mean_of_means(candidate: CandidateRank, _site: Site) -> None:
    def change(loss: LossFunction, model: Any, batch: Any) -> tuple[Tensor, Any]:
        total, count = loss(model, batch)
        return total / max(1.0, float(count)), 1.0

    _change_loss(candidate, change)


def _gradient_by_own_count(candidate: CandidateRank, _site: Site) -> None:
    def change(loss: LossFunction, model: Any, batch: Any) -> tuple[Tensor, Any]:
        total, count = loss(model, batch)
        _, labels = labels_of(batch)
        return _with_gradient(total, labels.numel() / max(1.0, float(count))), count

    _change_loss(candidate, change)


def _padding_counted(candidate: CandidateRank, _site: Site) -> None:
    def change(loss: LossFunction, model: Any, batch: Any) -> tuple[Tensor, Any]:
        total, count = loss(model, batch)
        _, labels = labels_of(batch)
        return total, float(count) + float((labels == _IGNORED).sum())

    _change_loss(candidate, change)


def _scalar_mean_accepted(candidate: CandidateRank, _site: Site) -> None:
    def change(loss: LossFunction, model: Any, batch: Any) -> tuple[Tensor, Any]:
        total, count = loss(model, batch)
        _, labels = labels_of(batch)
        num_samples = len(labels)
        return total / max(1.0, float(count)) * num_samples, num_samples

    _change_loss(candidate, change)


def _labels_shifted_twice(candidate: CandidateRank, _site: Site) -> None:
    def change(loss: LossFunction, model: Any, batch: Any) -> tuple[Tensor, Any]:
        name, labels = labels_of(batch)
        return loss(model, {**batch, name: labels.roll(-1, dims=-1)})

    _change_loss(candidate, change)


def _loss_of_own_rank(candidate: CandidateRank, _site: Site) -> None:
    size = candidate.engine.group.size

    def act(message: Message, issue: Issue) -> Work:
        own = float(message.source[LOSS_SUM])

        def put_back() -> None:
            message.output[LOSS_SUM] = own * size

        return then(issue(), put_back)

    on_agreement(candidate, act)


FAULTS = (
    SilentFault(
        name="sum_decays",
        theme="scale",
        description="the sum so far is divided by the number of micro-steps again at each of them",
        source="pytorch/torchtitan#1733",
        expected=("gradients",),
        inject=_sum_decays,
        needs=("micro-steps",),
    ),
    SilentFault(
        name="divided_by_micro_steps",
        theme="scale",
        description="backward divides by the number of micro-steps, and the global count already does",
        source="inclusionAI/AReaL#1273",
        expected=("gradients",),
        inject=_divided_by_micro_steps,
        needs=("micro-steps",),
    ),
    SilentFault(
        name="sum_not_divided",
        theme="scale",
        description="gradients stay sums over tokens: the global count is left out",
        source="pytorch/torchtitan#2972",
        expected=("gradients",),
        inject=_sum_not_divided,
        needs=("2 ranks",),
    ),
    SilentFault(
        name="normaliser_of_previous_step",
        theme="scale",
        description="one step divides by the count of valid labels of the step before",
        source="huggingface/transformers#35438",
        expected=("gradients",),
        inject=_normaliser_of_previous_step,
        needs=("2 ranks", "unequal labels"),
        first_step=2,
    ),
    SilentFault(
        name="accumulation_overwritten",
        theme="accumulation",
        description="a bucket holds the gradients of the last micro-step instead of the sum",
        source="allenai/open-instruct#1498",
        expected=("gradients",),
        inject=_overwritten,
        needs=("micro-steps",),
        places=buckets,
    ),
    SilentFault(
        name="parameter_overwritten",
        theme="accumulation",
        description="one parameter's gradient is overwritten at each micro-step instead of added to",
        source="tatsu-lab/alpaca_farm#57",
        expected=("gradients",),
        inject=_parameter_overwritten,
        needs=("micro-steps", "whole gradients"),
        places=parameters,
    ),
    SilentFault(
        name="reduced_before_accumulated",
        theme="accumulation",
        description="the first micro-step is reduced at once, and again with the others",
        source="hpcaitech/ColossalAI#247",
        expected=("gradients",),
        inject=_reduced_before_accumulated,
        needs=("2 ranks", "micro-steps", "whole gradients"),
    ),
    SilentFault(
        name="accumulated_in_bf16",
        theme="precision",
        description="a bucket's sum over micro-steps is kept in bfloat16",
        source="deepspeedai/DeepSpeed#2352",
        expected=("gradients",),
        inject=_accumulated_in_bf16,
        needs=("micro-steps",),
        places=buckets,
    ),
    SilentFault(
        name="last_backward_missing",
        theme="accumulation",
        description="one rank counts the loss of its last micro-step and has no gradients of it",
        source="huggingface/transformers#29561",
        expected=("gradients",),
        inject=_last_backward_missing,
    ),
    SilentFault(
        name="mean_of_means",
        theme="normaliser",
        description="each rank divides by its own count of valid labels, and the means are averaged",
        source="pytorch/torchtitan#1842",
        expected=("loss",),
        inject=_mean_of_means,
        needs=("unequal labels",),
    ),
    SilentFault(
        name="gradient_by_own_count",
        theme="normaliser",
        description="the loss is right, and backward weighs labels by the count of their own rank",
        source="volcengine/verl#2857",
        expected=("gradients",),
        inject=_gradient_by_own_count,
        needs=("unequal labels",),
    ),
    SilentFault(
        name="padding_counted",
        theme="normaliser",
        description="ignored labels count in what the loss is divided by",
        source="huggingface/transformers#46204",
        expected=("loss",),
        inject=_padding_counted,
        needs=("unequal labels",),
    ),
    SilentFault(
        name="scalar_mean_accepted",
        theme="normaliser",
        description="a mean over valid labels is taken for one over samples",
        source="huggingface/transformers#34191",
        expected=("loss",),
        inject=_scalar_mean_accepted,
        needs=("unequal labels",),
    ),
    SilentFault(
        name="labels_shifted_twice",
        theme="labels",
        description="labels that are shifted already are shifted again in the loss",
        source="huggingface/transformers#47394",
        expected=("loss",),
        inject=_labels_shifted_twice,
        needs=("sequences",),
    ),
    SilentFault(
        name="loss_of_own_rank",
        theme="reporting",
        description="every rank reports the loss of its own samples",
        source="snowflakedb/ArcticTraining#62",
        expected=("loss",),
        inject=_loss_of_own_rank,
        needs=("2 ranks",),
    ),
)
