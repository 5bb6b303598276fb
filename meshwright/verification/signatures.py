"""From the shape of an error to its likely cause: a table of what public bugs look like from outside. No torch.

Owns the guesses. A guess is words for people beside the facts; nothing is decided by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_SAME_RATIO = 1e-6


@dataclass(frozen=True)
class Sizes:
    """Numbers of the run that a wrong factor may equal.

    Attributes:
        dp: data-parallel ranks.
        num_microbatches: micro-steps of a step.
        steps: steps compared.
        policy: name of the sharding policy.
    """

    dp: int
    num_microbatches: int
    steps: int
    policy: str


@dataclass(frozen=True)
class Facts:
    """What is known of the first wrong tensor.

    Attributes:
        check: that found it.
        step: training step; 0 before training.
        microbatch: micro-step, -1 for the whole step.
        ratio: candidate / reference where that is one number, else None.
        ranks: ranks whose pieces are wrong.
        holders: ranks that hold a piece.
        failed: names of all checks that failed.
        same_step: names of checks that failed in the same step.
        problem: why nothing could be compared; empty else.
        is_one_number: the tensor has one element, which always has one ratio.
        is_alone: no other tensor of the check is wrong in the step.
    """

    check: str
    step: int
    microbatch: int
    ratio: float | None
    ranks: tuple[int, ...]
    holders: tuple[int, ...]
    failed: frozenset[str]
    same_step: frozenset[str]
    problem: str = ""
    is_one_number: bool = False
    is_alone: bool = False

    @property
    def is_after_clipping(self) -> bool:
        """Whether gradients are wrong whose norm is right."""
        return self.check == "gradients" and "grad_norm" not in self.same_step

    @property
    def some_ranks(self) -> bool:
        """Whether some ranks' pieces are right."""
        return set(self.ranks) < set(self.holders)


def guess(facts: Facts, sizes: Sizes) -> str:
    """The likely cause of an error in one or two sentences; empty where nothing is known."""
    if facts.check in ("gradients", "grad_norm", "loss", "activations") and facts.ratio is not None:
        text = _factor(facts, facts.ratio, sizes)
        if text:
            return text
    return next((signature.text for signature in _SIGNATURES if signature.applies(facts, sizes)), "")


def _factor(facts: Facts, ratio: float, sizes: Sizes) -> str:
    """What a constant factor says."""
    if ratio == 0.0:
        return "0 = nothing arrived: never computed, never reduced, or overwritten by zeros."
    if _same(ratio, -1.0):
        return "-1 = the sign is turned: maximised instead of minimised, or a difference taken the wrong way."
    dp, micro = sizes.dp, sizes.num_microbatches
    names: list[tuple[float, str, str]] = [
        (dp, "dp", "summed over dp and not divided, or reduced twice; it must be taken once."),
        (micro, "micro-steps", "the sum over micro-steps was not divided, or was counted once each micro-step."),
        (dp * micro, "dp x micro-steps", "a sum over all parts of the batch was not divided."),
    ]  # fmt: skip
    inverse: list[tuple[float, str, str]] = [
        (dp, "1/dp", "divided by dp although sum / global count is already the mean, or only this rank's part."),
        (micro, "1/micro-steps", "divided by the number of micro-steps although the global count already does."),
        (dp * micro, "1/(dp x micro-steps)", "divided by the number of parts besides the global count."),
    ]  # fmt: skip
    if facts.check == "grad_norm":
        names += [(math.sqrt(dp), "sqrt(dp)", "squares of replicated gradients were counted once a rank.")]
        inverse += [(math.sqrt(dp), "1/sqrt(dp)", "squares of some ranks' shards are missing.")]
    found = [item for item in names if item[0] > 1 and _same(ratio, item[0])]
    found += [item for item in inverse if item[0] > 1 and _same(ratio, 1 / item[0])]
    if not found and facts.is_one_number:
        return ""
    if not found and facts.is_after_clipping:
        return ""
    if not found:
        known = f"dp {dp}, micro-steps {micro}"
        return f"{ratio:.6g} is one factor for all wrong elements, and none of this run's sizes ({known})."
    return f"{ratio:.6g} = {' = '.join(name for _, name, _ in found)}: {found[0][2]}"


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= _SAME_RATIO * abs(b)


@dataclass(frozen=True)
class Signature:
    """One way to be wrong: when it applies, and what it means."""

    applies: Callable[[Facts, Sizes], bool]
    text: str


_SIGNATURES = (
    Signature(
        lambda f, _s: f.check == "data" and "was not read" in f.problem,
        "A part of the batch was never read: a micro-step was skipped, or a rank's samples were.",
    ),
    Signature(
        lambda f, _s: f.check == "data" and "twice" in f.problem,
        "The order of samples is no permutation: within an epoch every sample must come exactly once.",
    ),
    Signature(
        lambda f, _s: f.check == "data",
        "Ranks read other samples than the index law gives: a seed or an order of its own on a rank, micro-steps "
        "swapped, or content that changes with each read.",
    ),
    Signature(
        lambda f, _s: f.check == "parameters" and f.step == 0,
        "The first weights are not the reference's: a draw that depends on the rank or on the order of modules, or "
        "shards put in the wrong place.",
    ),
    Signature(
        lambda f, _s: f.check == "activations" and "no rank" in f.problem,
        "A part of the batch was never computed: a micro-step or a rank's samples were skipped.",
    ),
    Signature(
        lambda f, _s: f.check in ("activations", "loss") and f.step > 1,
        "Step 1 was right: the weights of this step are not the ones that step 1 should have left. A stale copy was "
        "used or updated, the updated weights did not reach every rank, or the model runs in another mode or with the "
        "first step's masks.",
    ),
    Signature(
        lambda f, _s: f.check == "activations" and f.some_ranks,
        "Only some ranks' samples are wrong: their weights, mask, positions or dropout differ.",
    ),
    Signature(
        lambda f, _s: f.check == "activations",
        "The forward itself differs: a swapped layer, a mask, positions, or samples of the batch mixed by the model.",
    ),
    Signature(
        lambda f, _s: f.check == "loss",
        "Module outputs are right and the loss is not: ignored labels were counted, means of unequal parts were "
        "averaged, or a part of the batch is missing.",
    ),
    Signature(
        lambda f, _s: f.check == "gradients" and f.problem != "",
        "Whether a parameter has a gradient must be agreed over all ranks: used on one is used everywhere.",
    ),
    Signature(
        lambda f, _s: f.check == "gradients" and "replicas" in f.same_step,
        "Replicas differ too: the gradient was not reduced over dp, or over a part of its ranks, so ranks keep the one "
        "of their samples.",
    ),
    Signature(
        lambda f, _s: f.check == "gradients" and f.some_ranks,
        "Only some ranks' shards are wrong: their part of the reduction is missing, swapped or scaled.",
    ),
    Signature(
        lambda f, _s: f.is_after_clipping,
        "The norm before clipping is right and what is left after it is not: clipped by another norm, e.g. per shard, "
        "by none, or divided by another count; or shards of two ranks are in each other's place.",
    ),
    Signature(
        lambda f, _s: f.check == "gradients" and f.is_alone,
        "Only this parameter's gradient is wrong: one of its uses is missing, its layer's input was changed before "
        "backward, or a micro-step overwrote the sum.",
    ),
    Signature(
        lambda f, _s: f.check == "gradients" and f.step > 1,
        "Step 1 was right: something is carried over from it, such as gradients or a count that was not reset, or a "
        "reduction of this step is missing.",
    ),
    Signature(
        lambda f, _s: f.check == "gradients",
        "Loss right, gradients wrong by no single factor: a part of the batch is missing from the sum or in it twice "
        "(a micro-step, a rank, an early reduction).",
    ),
    Signature(
        lambda f, _s: f.check == "grad_norm",
        "Gradients are right and their norm is not: each logical element must be counted on exactly one rank.",
    ),
    Signature(
        lambda f, _s: f.check == "parameters",
        "Gradients are right and the update is not: a stale copy, another learning rate, decay or clipping, or "
        "shards gathered in the wrong order.",
    ),
    Signature(
        lambda f, _s: f.check == "optimizer",
        "Gradients and parameters are right so far and the optimizer's state is not: lost, reset or swapped state.",
    ),
    Signature(
        lambda f, _s: f.check == "buffers",
        "A buffer was lost or reset, or it follows the samples of one rank: statistics must be those of the global "
        "micro-step, moved once.",
    ),
    Signature(
        lambda f, _s: f.check == "replicas",
        "Copies that must stay equal bit by bit drift apart: an update or a reduction that not every rank made.",
    ),
    Signature(
        lambda f, _s: f.check == "ties",
        "Parameters that were one tensor are two: each gets only its own part of the gradient.",
    ),
    Signature(
        lambda f, _s: f.check == "counts",
        "The plan's formula and the program disagree: a collective is missing, doubled or of another kind.",
    ),
)
