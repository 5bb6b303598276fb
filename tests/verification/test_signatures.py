import pytest

from meshwright.verification.signatures import Facts, Sizes, guess

SIZES = Sizes(dp=4, num_microbatches=3, steps=3, policy="ddp")


def facts(check, *, ratio=None, step=1, ranks=(0, 1, 2, 3), failed=(), same_step=(), problem="", alone=False):
    return Facts(
        check=check,
        step=step,
        microbatch=-1,
        ratio=ratio,
        ranks=ranks,
        holders=(0, 1, 2, 3),
        failed=frozenset({check, *failed}),
        same_step=frozenset({check, *same_step}),
        problem=problem,
        is_one_number=check in ("loss", "grad_norm"),
        is_alone=alone,
    )


@pytest.mark.parametrize(
    ("ratio", "start"),
    [
        (4.0, "4 = dp: summed over dp"),
        (0.25, "0.25 = 1/dp: "),
        (3.0, "3 = micro-steps: "),
        (1 / 3, "0.333333 = 1/micro-steps: "),
        (12.0, "12 = dp x micro-steps: "),
        (1 / 12, "0.0833333 = 1/(dp x micro-steps): "),
        (0.0, "0 = nothing arrived"),
        (-1.0, "-1 = the sign is turned"),
        (5.0, "5 is one factor for all wrong elements, and none of this run's sizes (dp 4, micro-steps 3)."),
    ],
)
def test_factors_are_named_by_the_runs_sizes(ratio, start):
    assert guess(facts("gradients", ratio=ratio, same_step=("grad_norm",)), SIZES).startswith(start)


def test_equal_sizes_are_both_named():
    assert guess(facts("gradients", ratio=2.0), Sizes(2, 2, 3, "ddp")).startswith("2 = dp = micro-steps: ")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (facts("grad_norm", ratio=2.0), "squares of replicated gradients"),
        (facts("grad_norm", ratio=0.5), "squares of some ranks' shards are missing"),
        (facts("grad_norm", ratio=1.7), "counted on exactly one rank"),
        (facts("loss", ratio=1.1), "ignored labels were counted"),
        (facts("loss", step=2), "Step 1 was right"),
        (facts("activations", step=2), "Step 1 was right"),
        (facts("activations", ranks=(2,)), "Only some ranks' samples"),
        (facts("activations"), "The forward itself differs"),
        (facts("activations", problem="no rank computed it"), "never computed"),
        (facts("gradients", same_step=("replicas", "grad_norm")), "not reduced over dp"),
        (facts("gradients", ranks=(1,), same_step=("grad_norm",)), "Only some ranks' shards"),
        (facts("gradients", step=3, same_step=("grad_norm",)), "carried over"),
        (facts("gradients", failed=("grad_norm",)), "clipped by another norm"),
        (facts("gradients", ratio=2.5), "clipped by another norm"),
        (facts("gradients", same_step=("grad_norm",), alone=True), "one of its uses is missing"),
        (facts("gradients", same_step=("grad_norm",)), "a part of the batch is missing"),
        (facts("gradients", problem="only the candidate has a gradient"), "used on one is used everywhere"),
        (facts("parameters", step=0), "first weights"),
        (facts("parameters", step=3), "the update is not"),
        (facts("optimizer", step=3), "optimizer's state is not"),
        (facts("buffers", step=3), "statistics"),
        (facts("replicas"), "drift apart"),
        (facts("ties"), "one tensor are two"),
        (facts("counts"), "formula and the program disagree"),
        (facts("data", problem="index 1 was read and the stream has 0"), "other samples"),
        (facts("data", problem="index 1 was not read"), "never read"),
        (facts("data", problem="index 1 comes twice in one epoch"), "no permutation"),
    ],
)
def test_shapes_of_errors_have_causes(found, words):
    assert words in guess(found, SIZES)
