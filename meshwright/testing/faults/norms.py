"""Silent faults of the gradient norm and of clipping."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.comm.transports.base import Work
from meshwright.sharding.engine import sum_of_squares
from meshwright.testing.faults.patching import (
    NORM_SQUARED,
    Agreement,
    Issue,
    Message,
    Method,
    on_agreement,
    patch,
    then,
    trained,
)
from meshwright.testing.faults.places import gap_of, gaps
from meshwright.testing.faults.silent import SilentFault, Site
from meshwright.training.clip import clip_coefficient
from meshwright.verification.rank import CandidateRank


def _clip_by(candidate: CandidateRank, norm: Callable[[Agreement], float]) -> None:
    """Clip by another norm than the one that is reported."""
    agreement = Agreement(candidate)

    def make(scale: Method) -> Method:
        def clipping(_factor: float) -> None:
            scale(clip_coefficient(norm(agreement), candidate.clip_norm) * agreement.correction)

        return clipping

    patch(candidate.engine, "scale_gradients", make)


def _clip_missing(candidate: CandidateRank, _site: Site) -> None:
    _clip_by(candidate, lambda _agreement: 0.0)


def _clip_per_shard(candidate: CandidateRank, _site: Site) -> None:
    engine = candidate.engine
    _clip_by(candidate, lambda agreement: float(engine.norm_squared().sqrt()) * agreement.correction)


def _clip_before_normalising(candidate: CandidateRank, _site: Site) -> None:
    _clip_by(candidate, lambda agreement: agreement.norm * agreement.count)


def _norm_from(candidate: CandidateRank, square: Callable[[Tensor], Tensor]) -> None:
    """Sum `square` of each bucket's gradient shard into this rank's part of the norm."""

    def norm_squared() -> Tensor:
        return torch.stack([square(memory.gradient_shard).double() for memory in trained(candidate)]).sum()

    patch(candidate.engine, "norm_squared", lambda _plain: norm_squared)


def _norm_counts_replicas(candidate: CandidateRank, _site: Site) -> None:
    _norm_from(candidate, sum_of_squares)


def _norm_in_float32(candidate: CandidateRank, _site: Site) -> None:
    size, index = candidate.engine.group.size, candidate.engine.group.index
    replicated = not candidate.engine.policy.shards_optimizer

    def square(shard: Tensor) -> Tensor:
        own = shard.view(size, -1)[index] if replicated else shard
        return own.float().square().sum()

    _norm_from(candidate, square)


def _norm_of_own_shard(candidate: CandidateRank, _site: Site) -> None:
    def act(message: Message, issue: Issue) -> Work:
        own = float(message.source[NORM_SQUARED])

        def put_back() -> None:
            message.output[NORM_SQUARED] = own

        return then(issue(), put_back)

    on_agreement(candidate, act)


def _norms_averaged(candidate: CandidateRank, _site: Site) -> None:
    size = candidate.engine.group.size

    def act(message: Message, issue: Issue) -> Work:
        message.source[NORM_SQUARED] = message.source[NORM_SQUARED].sqrt()

        def average() -> None:
            message.output[NORM_SQUARED] = (message.output[NORM_SQUARED] / size) ** 2

        return then(issue(), average)

    on_agreement(candidate, act)


def _padding_in_norm(candidate: CandidateRank, site: Site) -> None:
    memory = next(m for m in trained(candidate) if m.bucket.name == site.place.name)
    first = 0 if memory.owner_count == 1 else memory.shard_slice.start

    def make(norm_squared: Method) -> Method:
        def with_padding() -> Tensor:
            if candidate.rank != site.rank:
                return norm_squared()
            element = gap_of(candidate, memory, site.rank)[0] - first
            memory.gradient_shard[element] = memory.gradient_shard.abs().max()
            total = norm_squared()
            memory.gradient_shard[element] = 0.0
            return total

        return with_padding

    patch(candidate.engine, "norm_squared", make)


FAULTS = (
    SilentFault(
        name="clip_missing",
        theme="clipping",
        description="the norm is right, and nothing is clipped",
        source="deepspeedai/DeepSpeed#6480",
        expected=("gradients",),
        inject=_clip_missing,
        needs=("2 ranks", "clipping"),
    ),
    SilentFault(
        name="clip_per_shard",
        theme="clipping",
        description="each rank clips by the norm of what it owns",
        source="sgl-project/SpecForge#663",
        expected=("gradients",),
        inject=_clip_per_shard,
        needs=("2 ranks", "clipping"),
    ),
    SilentFault(
        name="clip_before_normalising",
        theme="clipping",
        description="clipped by the norm of sums that are not divided by the count yet",
        source="pytorch/examples#1196",
        expected=("gradients",),
        inject=_clip_before_normalising,
        needs=("2 ranks", "clipping"),
    ),
    SilentFault(
        name="norm_counts_replicas",
        theme="norm",
        description="replicated gradients enter the norm once a rank",
        source="ROCm/TransformerEngine#715",
        expected=("grad_norm",),
        inject=_norm_counts_replicas,
        needs=("2 ranks", "ddp"),
    ),
    SilentFault(
        name="norm_of_own_shard",
        theme="norm",
        description="each rank takes the norm of what it owns for that of the whole",
        source="pytorch/torchtitan#596",
        expected=("grad_norm",),
        inject=_norm_of_own_shard,
        needs=("2 ranks",),
    ),
    SilentFault(
        name="norms_averaged",
        theme="norm",
        description="norms of different parts are averaged instead of their squares summed",
        source="deepspeedai/DeepSpeed#8475",
        expected=("grad_norm",),
        inject=_norms_averaged,
        needs=("2 ranks",),
    ),
    SilentFault(
        name="norm_in_float32",
        theme="precision",
        description="squares are summed in float32 over whole buckets",
        source="pytorch/pytorch#68326",
        expected=("grad_norm",),
        inject=_norm_in_float32,
    ),
    SilentFault(
        name="padding_in_norm",
        theme="norm",
        description="one element of a bucket's padding is not zero when the norm is taken",
        source="NVIDIA/Megatron-LM#5898",
        expected=("grad_norm",),
        inject=_padding_in_norm,
        places=gaps,
    ),
)
