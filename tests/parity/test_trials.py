"""The script of random trials: draws can be repeated, sections replace their own, and a few trials on real ranks."""

import dataclasses
from random import Random

import pytest

from tests.parity import report, trials
from tests.parity.sites import KINDS
from tests.parity.subjects import FAMILIES
from tests.parity.verifying import Verifier


@pytest.mark.parametrize("family", list(FAMILIES))
def test_draws_are_legal_and_repeat(family):
    for seed in range(5):
        first, second = (trials.draw_job(Random(seed), family=family) for _ in range(2))
        assert first.words == second.words
        assert dataclasses.replace(first.job, functions=None) == dataclasses.replace(
            second.job, functions=None
        )
        assert (first.job.functions is None) == (family == "preset")


def test_sections_replace_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "DOCUMENT", tmp_path / "parity.md")
    report.write_section("# First\n\none\n")
    report.write_section("## Second\n\ntwo")
    report.write_section("# First\n\nthree")
    assert report.DOCUMENT.read_text() == "# First\n\nthree\n\n## Second\n\ntwo\n"
    report.write_section("## Second\n\nfour\n")
    assert report.DOCUMENT.read_text() == "# First\n\nthree\n\n## Second\n\nfour\n"


def test_trials_on_ranks(ranks, monkeypatch):
    """One correct configuration passes; three sites of another are named."""
    monkeypatch.setattr(trials, "SITES_OF_A_REFERENCE", 3)
    with Verifier(ranks) as verifier:
        row = trials.correct_trial(verifier, 0, 2)
        assert row["ok"], row["problem"]
        rows = trials.sensitivity_trials(verifier, 0, 2)
        assert {row["kind"] for row in rows} == set(KINDS)
        assert [row["problem"] for row in rows] == [""] * trials.SITES_OF_A_REFERENCE
        text = trials.section(
            [{**r, "trial": "sensitivity"} for r in rows] + [{**row, "trial": "correct"}],
            commit="c",
            seed=0,
            seconds=1,
        )
        assert "**1 of 1 random correct configurations pass**" in text
        assert "**3 of 3 single elements are found and named**" in text


def test_a_site_that_is_not_spoiled_is_not_caught(ranks, monkeypatch):
    monkeypatch.setattr(trials, "SITES_OF_A_REFERENCE", 3)
    monkeypatch.setattr("tests.parity.sites.RELATIVE", 0.0)
    with Verifier(ranks) as verifier:
        rows = trials.sensitivity_trials(verifier, 0, 2)
    assert [row["problem"].splitlines()[0] for row in rows] == ["not caught"] * 3
