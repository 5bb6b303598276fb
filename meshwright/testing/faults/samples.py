"""Silent faults of data: which samples each rank reads in which micro-step."""

from __future__ import annotations

from typing import Any

from meshwright.data.index_law import rank_range
from meshwright.data.order import sample_ids
from meshwright.testing.faults.patching import Method, patch
from meshwright.testing.faults.silent import SilentFault, Site
from meshwright.verification.rank import CandidateRank


def _last_micro_step_skipped(candidate: CandidateRank, _site: Site) -> None:
    candidate.num_microbatches -= 1


def _first_micro_step_skipped(candidate: CandidateRank, _site: Site) -> None:
    candidate.num_microbatches -= 1

    def make(micro_batch: Method) -> Method:
        return lambda step, microbatch: micro_batch(step, microbatch + 1)

    patch(candidate.batches, "micro_batch", make)


def _micro_batch_used_twice(candidate: CandidateRank, site: Site) -> None:
    def make(micro_batch: Method) -> Method:
        def repeating(step: int, microbatch: int) -> Any:
            repeats = step == site.step - 1 and microbatch == candidate.num_microbatches - 1
            return micro_batch(step, microbatch - 1 if repeats else microbatch)

        return repeating

    patch(candidate.batches, "micro_batch", make)


def _order_seed_by_rank(candidate: CandidateRank, _site: Site) -> None:
    candidate.batches.seed += candidate.rank


def _order_not_shuffled(candidate: CandidateRank, site: Site) -> None:
    candidate.batches.shuffle = candidate.rank != site.rank


def _samples_of_another_rank(candidate: CandidateRank, site: Site) -> None:
    if candidate.rank != site.rank:
        return
    batches = candidate.batches
    geometry = batches.geometry
    others = candidate.engine.group.ranks.index(site.other)

    def ids(step: int, microbatch: int) -> Any:
        own = geometry.rank_range(step, microbatch)
        theirs = rank_range(
            step,
            microbatch,
            global_batch=geometry.global_batch,
            num_microbatches=geometry.num_microbatches,
            dp_size=geometry.dp_size,
            dp_rank=others,
        )
        # As many as its own: parts may differ by one sample.
        return sample_ids(theirs.start, len(own), num_samples=len(batches.dataset), seed=batches.seed)

    patch(batches, "sample_ids", lambda _plain: ids)


def _last_sample_dropped(candidate: CandidateRank, _site: Site) -> None:
    if candidate.engine.group.index != candidate.engine.group.size - 1:
        return

    def make(plain: Method) -> Method:
        return lambda step, microbatch: plain(step, microbatch)[:-1]

    patch(candidate.batches, "sample_ids", make)


FAULTS = (
    SilentFault(
        name="last_micro_step_skipped",
        theme="skipped samples",
        description="every rank stops each step one micro-step early",
        source="EvolvingLMMs-Lab/Otter#304",
        expected=("data",),
        inject=_last_micro_step_skipped,
        needs=("micro-steps",),
    ),
    SilentFault(
        name="first_micro_step_skipped",
        theme="skipped samples",
        description="every rank begins each step one micro-step late",
        source="pytorch/torchtitan#816",
        expected=("data",),
        inject=_first_micro_step_skipped,
        needs=("micro-steps",),
    ),
    SilentFault(
        name="micro_batch_used_twice",
        theme="repeated samples",
        description="the last micro-step of one step reads the samples of the one before",
        source="NVIDIA-NeMo/Megatron-Bridge#5944",
        expected=("data",),
        inject=_micro_batch_used_twice,
        needs=("micro-steps",),
    ),
    SilentFault(
        name="order_seed_by_rank",
        theme="order of samples",
        description="each rank shuffles by a seed of its own",
        source="NVlabs/LongLive#71",
        expected=("data",),
        inject=_order_seed_by_rank,
        needs=("2 ranks",),
    ),
    SilentFault(
        name="order_not_shuffled",
        theme="order of samples",
        description="one rank reads the dataset in its own order, without the shuffle",
        source="pytorch/pytorch#31771",
        expected=("data",),
        inject=_order_not_shuffled,
    ),
    SilentFault(
        name="samples_of_another_rank",
        theme="repeated samples",
        description="one rank reads the samples of another, and its own are never read",
        source="vllm-project/speculators#427",
        expected=("data",),
        inject=_samples_of_another_rank,
        needs=("2 ranks",),
    ),
    SilentFault(
        name="last_sample_dropped",
        theme="skipped samples",
        description="the last rank drops the last sample of each micro-step",
        source="lhotse-speech/lhotse#654",
        expected=("data",),
        inject=_last_sample_dropped,
        needs=("no dropout", "2 samples"),
    ),
)
