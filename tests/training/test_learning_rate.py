"""Each schedule at its corners, as a pure function of the step."""

import pytest

from meshwright.training.learning_rate import LearningRate


def test_constant_with_warmup() -> None:
    rate = LearningRate("constant", peak=0.8, warmup_steps=4)
    assert [rate.at(step) for step in (0, 1, 2, 3, 4, 10**9)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert LearningRate("constant", peak=0.8).at(0) == 0.8


def test_cosine() -> None:
    rate = LearningRate("cosine", peak=1.0, warmup_steps=10, total_steps=111, final_ratio=0.1)
    assert rate.at(0) == pytest.approx(0.1)
    assert rate.at(9) == pytest.approx(1.0)
    assert rate.at(10) == pytest.approx(1.0)
    assert rate.at(60) == pytest.approx(0.55)  # half way between peak and end
    assert rate.at(35) == pytest.approx(0.1 + 0.9 * 0.8535533905932737)  # (1 + cos(π/4)) / 2
    assert rate.at(110) == pytest.approx(0.1)
    assert rate.at(500) == pytest.approx(0.1)  # beyond its end it does not rise again


def test_warmup_stable_decay() -> None:
    rate = LearningRate("wsd", peak=1.0, warmup_steps=2, decay_steps=10, total_steps=101, final_ratio=0.2)
    assert [rate.at(step) for step in (0, 1, 2, 50, 90)] == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0])
    assert [rate.at(step) for step in (91, 95, 100, 200)] == pytest.approx([0.92, 0.6, 0.2, 0.2])


@pytest.mark.parametrize("name", ["cosine", "wsd"])
def test_rates_never_rise_after_the_warmup_nor_leave_their_bounds(name: str) -> None:
    rate = LearningRate(name, peak=3.0, warmup_steps=7, decay_steps=20, total_steps=60, final_ratio=0.1)
    values = [rate.at(step) for step in range(60)]
    assert values[:7] == sorted(values[:7])
    assert values[6:] == sorted(values[6:], reverse=True)
    assert max(values) == 3.0
    assert values[-1] == pytest.approx(0.3)


@pytest.mark.parametrize(("name", "steps"), [("cosine", 1), ("wsd", 1), ("cosine", 5), ("wsd", 5)])
def test_runs_shorter_than_their_warmup(name: str, steps: int) -> None:
    rate = LearningRate(name, peak=1.0, warmup_steps=5, decay_steps=0, total_steps=steps)
    assert [rate.at(step) for step in range(steps)] == pytest.approx(
        [(step + 1) / 5 for step in range(steps)]
    )


@pytest.mark.parametrize("name", ["cosine", "wsd"])
def test_a_single_step_without_warmup_is_at_a_defined_rate(name: str) -> None:
    assert 0.1 <= LearningRate(name, peak=1.0, decay_steps=3, total_steps=1).at(0) <= 1.0


def test_a_decaying_schedule_needs_the_length_of_the_run() -> None:
    with pytest.raises(AssertionError, match="schedule cosine needs the length"):
        LearningRate("cosine", peak=1.0).at(3)
