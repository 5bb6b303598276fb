"""Silent faults of pipelines: what stages hand on, share, count or draw is another stage's or micro-batch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.adapt.context_parallel import ContextScope
from meshwright.adapt.context_parallel import Place as Positions
from meshwright.pipeline.executor import PipelineExecutor
from meshwright.schedule.action import Action
from meshwright.sharding.memory import BucketMemory
from meshwright.sharding.units import find_units
from meshwright.testing.faults.patching import Method, is_step, own_sum, patch, trained
from meshwright.testing.faults.silent import Place, SilentFault, Site
from meshwright.verification.rank import CandidateRank

Commit = Callable[[CandidateRank, Site], None]


def _executor(candidate: CandidateRank) -> PipelineExecutor:
    assert candidate.executor is not None, "the need of these faults is a pipeline"
    return candidate.executor


def _is_at(candidate: CandidateRank, number: int) -> bool:
    """Whether this rank is at that place of the pipeline, counted from the end where it is negative."""
    groups = candidate.engine.groups.pipeline
    assert groups is not None, "the need of these faults is a pipeline"
    return groups.place == number % groups.all.size


def _anywhere(_candidate: CandidateRank) -> list[Place]:
    """The same site on all stages, whose ranks differ."""
    return [Place(ranks=(0,))]


def _ties(candidate: CandidateRank) -> list[Place]:
    """Tied weights of the whole model, by their first names."""
    whole = candidate.engine.whole
    assert whole is not None, "a rank with stages knows the whole model"
    return [Place(first, (first,), (0,)) for first in sorted(set(whole.aliases.values()))]


def _memory_of(candidate: CandidateRank, site: Site) -> BucketMemory | None:
    """The bucket of the weight of the site; None where this rank's stages do not use it."""
    holding = [m for m in trained(candidate) if any(p.name == site.place.name for p in m.bucket.parameters)]
    return holding[0] if holding else None


# Weights that several stages use.


def _changed_by_sum(candidate: CandidateRank, site: Site, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """After the sum over stages the gradient of a tied weight is `change` of (own, sum)."""
    memory = _memory_of(candidate, site)

    def make(plain: Method) -> Method:
        def summed() -> None:
            own = None if memory is None else memory.gradient_shard.clone()
            plain()
            if memory is not None and own is not None and is_step(candidate, site):
                memory.gradient_shard.copy_(change(own, memory.gradient_shard))

        return summed

    patch(_executor(candidate)._shared, "sum", make)


def _not_summed(candidate: CandidateRank, site: Site) -> None:
    _changed_by_sum(candidate, site, lambda own, _total: own)


def _summed_twice(candidate: CandidateRank, site: Site) -> None:
    _changed_by_sum(candidate, site, lambda _own, total: 2 * total)


def _drifts(candidate: CandidateRank, site: Site) -> None:
    memory = _memory_of(candidate, site)
    if memory is None or not _is_at(candidate, -1):
        return

    def make(plain: Method) -> Method:
        def finished() -> None:
            plain()
            if is_step(candidate, site):
                with torch.no_grad():
                    memory.weight_shard.mul_(1.001)

        return finished

    patch(candidate.engine, "finish_step", make)


def _counted_on_each_stage(candidate: CandidateRank, site: Site) -> None:
    engine = candidate.engine

    def make(plain: Method) -> Method:
        def counted() -> Tensor:
            before = engine.counted_elsewhere
            engine.counted_elsewhere = frozenset() if is_step(candidate, site) else before
            try:
                total: Tensor = plain()
            finally:
                engine.counted_elsewhere = before
            return total

        return counted

    patch(engine, "norm_squared", make)


def _norm_of_one_stage(candidate: CandidateRank, site: Site) -> None:
    def make(plain: Method) -> Method:
        def counted() -> Tensor:
            total: Tensor = plain()
            return total if _is_at(candidate, 0) or not is_step(candidate, site) else torch.zeros_like(total)

        return counted

    patch(candidate.engine, "norm_squared", make)


# What comes from other stages, and from the batch.


def _inputs_of_another_micro_batch(candidate: CandidateRank, site: Site) -> None:
    if not _is_at(candidate, -1):
        return

    def make(plain: Method) -> Method:
        def read(now: Any, m: int) -> Any:
            return plain(now, 1 - m if m < 2 and is_step(candidate, site) else m)

        return read

    patch(_executor(candidate), "_batch", make)


def _stale(candidate: CandidateRank, site: Site, kind: str, at: int) -> None:
    """One message is that of an earlier micro-batch."""
    if not _is_at(candidate, at):
        return
    older: dict[int, dict[int, Tensor]] = {}

    def make(plain: Method) -> Method:
        def taken(now: Any, wanted: str, action: Action) -> dict[int, Tensor]:
            found: dict[int, Tensor] = plain(now, wanted, action)
            if wanted != kind:
                return found
            before = older.get(action.stage)
            older[action.stage] = {number: x.detach().clone() for number, x in found.items()}
            stale = before is not None and action.microbatch == max(1, site.microbatch)
            return before if before is not None and stale and is_step(candidate, site) else found

        return taken

    patch(_executor(candidate), "_taken", make)


def _stale_activation(candidate: CandidateRank, site: Site) -> None:
    _stale(candidate, site, "F", -1)


def _stale_gradient(candidate: CandidateRank, site: Site) -> None:
    _stale(candidate, site, "G", 0)


def _skip_gradient_dropped(candidate: CandidateRank, site: Site) -> None:
    executor = _executor(candidate)

    def make(plain: Method) -> Method:
        def taken(now: Any, kind: str, action: Action) -> dict[int, Tensor]:
            found: dict[int, Tensor] = plain(now, kind, action)
            if kind == "G" and is_step(candidate, site):
                passed_on = executor._batch(now, action.microbatch).stages[action.stage].receives
                return {n: torch.zeros_like(x) if n in passed_on else x for n, x in found.items()}
            return found

        return taken

    patch(executor, "_taken", make)


def _chunks_swapped(candidate: CandidateRank, site: Site) -> None:
    model = candidate.engine.model
    here = [name for name, unit in find_units(model).items() if next(unit.parameters(), None) is not None]
    other = dict(zip(here[:2], here[1::-1], strict=True))

    def make(plain: Method) -> Method:
        return lambda name: plain(other.get(name, name) if is_step(candidate, site) else name)

    patch(_executor(candidate)._holder, "module", make)


def _dropout_of_the_first_stage(candidate: CandidateRank, site: Site) -> None:
    def make(plain: Method) -> Method:
        return lambda step, m, before: plain(step, m, 0 if is_step(candidate, site) else before)

    patch(_executor(candidate), "randomness", make)


def _documents_of_the_newest(candidate: CandidateRank, site: Site) -> None:
    scope = candidate.context
    assert isinstance(scope, ContextScope), "the need of this fault is plan.cp"

    def make(plain: Method) -> Method:
        @contextmanager
        def backward(place: Positions) -> Iterator[None]:
            stays = is_step(candidate, site) and not scope._is_forward
            with scope.entered() if stays else plain(place):
                yield

        return backward

    patch(scope, "backward", make)


# Losses, divisors, accumulation.


def _loss_summed_over_stages(candidate: CandidateRank, site: Site) -> None:
    groups = candidate.engine.groups.pipeline
    assert groups is not None, "the need of these faults is a pipeline"

    def make(plain: Method) -> Method:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            tally: Tensor = plain(*args, **kwargs)
            return tally * torch.tensor([groups.all.size, 1]) if is_step(candidate, site) else tally

        return run

    patch(_executor(candidate), "run", make)


def _not_divided(candidate: CandidateRank, site: Site) -> None:
    def make(plain: Method) -> Method:
        def run(*args: Any, divisor: float, step: int) -> Any:
            return plain(*args, divisor=1.0 if is_step(candidate, site) else divisor, step=step)

        return run

    patch(_executor(candidate), "run", make)


def _divided_by_own_count(candidate: CandidateRank, site: Site) -> None:
    executor = _executor(candidate)

    def make(plain: Method) -> Method:
        def backward(now: Any, engine: Any, action: Action) -> None:
            right = now.divisor
            if action.stage == executor.schedule.num_stages - 1 and is_step(candidate, site):
                _, count = now.runs[action.stage, action.microbatch].loss()
                now.divisor = max(1.0, count) * candidate.num_microbatches * candidate.engine.group.size
            plain(now, engine, action)
            now.divisor = right

        return backward

    patch(executor, "_backward", make)


def _weight_gradients_lost(candidate: CandidateRank, site: Site) -> None:
    def make(plain: Method) -> Method:
        def made(now: Any, engine: Any, action: Action) -> None:
            if action.microbatch == candidate.num_microbatches - 1 and is_step(candidate, site):
                now.weights[action.stage, action.microbatch] = []
            plain(now, engine, action)

        return made

    patch(_executor(candidate), "_weight_gradients", make)


def _earlier_micro_batches_lost(candidate: CandidateRank, site: Site) -> None:
    if not _is_at(candidate, -1):
        return

    def make(plain: Method) -> Method:
        def expect(*, last: bool) -> None:
            if last and is_step(candidate, site):
                for memory in trained(candidate):
                    own_sum(memory).zero_()
            plain(last=last)

        return expect

    patch(candidate.engine, "expect_gradients", make)


def _fault(
    name: str,
    description: str,
    source: str,
    expected: tuple[str, ...],
    commit: tuple[Commit, Callable[[CandidateRank], list[Place]]],
    *needs: str,
    first_step: int = 1,
) -> SilentFault:
    inject, places = commit
    return SilentFault(
        name,
        "pipeline",
        description,
        source,
        expected,
        inject,
        needs=("stages", *needs),
        places=places,
        first_step=first_step,
    )


FAULTS = (
    _fault(
        "tie_not_summed_over_stages",
        "each stage keeps its own gradient of a weight that several stages use",
        "NVIDIA/Megatron-LM#844",
        ("gradients",),
        (_not_summed, _ties),
        "shared weights",
    ),
    _fault(
        "tie_summed_twice_over_stages",
        "the gradient of a weight that several stages use is summed over them and summed again",
        "NVIDIA/Megatron-LM#844",
        ("gradients",),
        (_summed_twice, _ties),
        "shared weights",
    ),
    _fault(
        "tie_drifts_between_stages",
        "the last stage's copy of a tied weight is updated otherwise than the first one's",
        "NVIDIA/Megatron-LM#656",
        ("parameters",),
        (_drifts, _ties),
        "shared weights",
    ),
    _fault(
        "tie_counted_on_each_stage",
        "a weight that several stages use enters the gradient norm once for each of them",
        "NVIDIA/Megatron-LM#7452",
        ("grad_norm",),
        (_counted_on_each_stage, _anywhere),
        "shared weights",
    ),
    _fault(
        "norm_of_one_stage",
        "gradients are clipped by the norm of the first stage's alone",
        "pytorch/torchtitan#596",
        ("grad_norm",),
        (_norm_of_one_stage, _anywhere),
    ),
    _fault(
        "inputs_of_another_micro_batch",
        "the last stage reads labels and masks of another micro-batch than the one whose activations it gets",
        "deepspeedai/DeepSpeed#5729",
        ("activations", "loss"),
        (_inputs_of_another_micro_batch, _anywhere),
    ),
    _fault(
        "stale_activation",
        "a stage finds an earlier micro-batch's activations in the buffer in which it receives",
        "NVIDIA/Megatron-LM#5876",
        ("activations",),
        (_stale_activation, _anywhere),
    ),
    _fault(
        "stale_gradient",
        "a stage finds an earlier micro-batch's gradients in the buffer in which it receives",
        "deepspeedai/DeepSpeed#2800",
        ("gradients",),
        (_stale_gradient, _anywhere),
    ),
    _fault(
        "skip_gradient_dropped",
        "a stage that uses a value and hands it on returns its own gradient without that of the stages behind",
        "pytorch/pytorch#127964",
        ("gradients",),
        (_skip_gradient_dropped, _anywhere),
        "skip connections",
    ),
    _fault(
        "chunks_swapped",
        "a rank with two stages runs a block of each in the other's place",
        "hpcaitech/ColossalAI#796",
        ("activations",),
        (_chunks_swapped, _anywhere),
        "several stages",
    ),
    _fault(
        "dropout_of_the_first_stage",
        "each stage counts its random calls from its own first one, and draws the first stage's masks",
        "pytorch/pytorch#55036",
        ("activations",),
        (_dropout_of_the_first_stage, _anywhere),
        "dropout",
    ),
    _fault(
        "documents_of_the_newest",
        "what runs again in backward attends by the documents of the newest micro-batch",
        "pytorch/torchtitan#1723",
        ("gradients",),
        (_documents_of_the_newest, _anywhere),
        "cut sequences",
        "documents",
        "layers that run again",
    ),
    _fault(
        "loss_summed_over_stages",
        "the loss that is shown is summed over the stages as if each had a part of it",
        "NVIDIA/Megatron-LM#1379",
        ("loss",),
        (_loss_summed_over_stages, _anywhere),
    ),
    _fault(
        "sum_not_divided_in_stages",
        "with stages the gradients stay sums over tokens",
        "pytorch/torchtitan#2972",
        ("gradients",),
        (_not_divided, _anywhere),
        first_step=2,  # the first step has nothing to divide by yet
    ),
    _fault(
        "divided_by_own_count",
        "each micro-batch's gradients are divided by its own count of labels, and then averaged",
        "huggingface/transformers#34191",
        ("gradients",),
        (_divided_by_own_count, _anywhere),
        "unequal labels",
    ),
    _fault(
        "weight_gradients_lost",
        "the weight gradients of the last micro-batch, which wait for their own pass, are never made",
        "deepspeedai/Megatron-DeepSpeed#442",
        ("gradients",),
        (_weight_gradients_lost, _anywhere),
        "split backward",
    ),
    _fault(
        "earlier_micro_batches_lost",
        "a stage forgets before its last backward what the earlier ones have summed",
        "NVIDIA-NeMo/Automodel#3530",
        ("gradients",),
        (_earlier_micro_batches_lost, _anywhere),
    ),
)
