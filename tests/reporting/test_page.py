"""What is drawn is what the files of the run say."""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import pairwise

import pytest

from meshwright.reporting.figure import Figure, Missing
from meshwright.reporting.figures import MOST_POINTS, figures_of
from meshwright.reporting.page import as_page
from meshwright.reporting.reading import read_run
from meshwright.reporting.svg import Bar, bars, count_bars
from meshwright.reporting.timeline import MOST_BOXES
from meshwright.reporting.verdict import verdict
from meshwright.schedule.catalogue import make_schedule
from tests.reporting.folders import RESULT, Page, make_folder, plan_of, steps


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "run")


@pytest.fixture
def page(folder):
    return Page(as_page([read_run(folder)]))


def test_the_page_is_whole_and_asks_for_nothing(page):
    assert page.open == []
    assert page.tags.isdisjoint({"script", "img", "iframe", "object", "style@import"})
    assert {source.partition(":")[0] for source in page.sources if not source.startswith("#")} == {"data"}
    assert {source[1:] for source in page.sources if source.startswith("#")} <= set(page.anchors)
    assert len(page.anchors) == len(set(page.anchors))


def test_sections_stand_in_the_order_of_the_design(page):
    assert list(page.sections) == [
        "suggestions", "memory", "peaks", "prediction", "breakdown", "schedule", "communication", "loss",
        "gradient-norm", "learning-rate", "mfu", "throughput", "verify", "configuration", "environment",
    ]  # fmt: skip


def test_every_figure_has_its_marks_and_they_are_its_data(folder, page):
    for figure in figures_of(read_run(folder)):
        assert isinstance(figure, Figure), figure
        drawn = page.sections[figure.anchor]
        assert drawn.marks + drawn.points == figure.num_marks
        assert len(drawn.rows) == len(figure.rows)
        assert all(row[0] for row in drawn.rows)
        if figure.drawing:
            assert figure.num_marks > 0


def test_curves_are_the_numbers_of_the_metrics(page):
    written = steps()
    loss, norm = page.sections["loss"], page.sections["gradient-norm"]
    assert (loss.points, loss.marks) == (6, 1)
    assert [float(row[2]) for row in loss.rows] == [line["loss"] for line in written] + [3.5]
    # A skipped step has no norm: no point, and no zero.
    assert [(row[0], float(row[2])) for row in norm.rows] == [
        (f"{line['step']}", line["grad_norm"]) for line in written if line["grad_norm"] is not None
    ]
    assert norm.points == 5


def test_bars_are_as_long_as_their_values(page):
    memory = page.sections["memory"]
    # weights, optimizer: predicted and measured; communication was measured only, and host holds nothing.
    assert memory.widths == pytest.approx([400 / 9, 400 / 9, 800 / 9, 100, 512 / (9 << 20) * 100], abs=0.006)
    assert [row[0] for row in memory.rows] == ["weights", "optimizer", "communication"]
    assert memory.rows[2][1:] == ["–", "512"]
    assert page.sections["peaks"].widths == pytest.approx([50, 66.67, 83.33, 100], abs=0.01)
    assert page.sections["communication"].widths == pytest.approx([100, 300 / 7], abs=0.01)
    # 0.4 of the step for the model, 0.1 again, the rest: all relative to the longest.
    assert page.sections["breakdown"].widths == pytest.approx([80, 20, 100], abs=0.01)


def test_a_run_of_one_step_has_points_and_equal_values_one_label(tmp_path):
    page = as_page([read_run(make_folder(tmp_path / "one", num_steps=1))])
    drawn = Page(page).sections["loss"]
    assert (drawn.points, drawn.marks) == (0, 2)  # a line of one point would not be seen
    figures = {figure.anchor: figure for figure in figures_of(read_run(make_folder(tmp_path / "six")))}
    assert figures["learning-rate"].drawing.count(">0.001</text>") == 1
    assert figures["loss"].drawing.count(">3</text>") == figures["loss"].drawing.count(">5.5</text>") == 1


def test_names_and_values_that_a_phone_has_no_room_for_stand_below_each_other():
    short, long = [Bar("measured", 1.0, "1 s")], [Bar("predicted", 0.0, "nothing")]
    drawing = bars({"a, b": short, "word " * 15: long}, label="times")
    heights = re.findall(r'<text x="(\w+%?)" y="(\d+)"[^>]*>([^<]*)<', drawing)
    assert [(x, text) for x, _, text in heights] == [
        ("0", "a, b"), ("100%", "1 s"), ("0", "word " * 8 + "word"), ("0", "word " * 5 + "word"), ("100%", "nothing"),
    ]  # fmt: skip
    places = [int(y) for _, y, _ in heights]
    assert all(after - before >= 16 for before, after in pairwise(places))
    assert drawing.count("<rect") == count_bars({"a": short, "b": long}) == 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "dualpipe"])
def test_the_timeline_has_a_box_an_action_and_none_overlap(tmp_path, name):
    folder = make_folder(tmp_path / "run", plan=plan_of(schedule=name))
    drawn = Page(as_page([read_run(folder)])).sections["schedule"]
    actions = [str(action) for program in make_schedule(name, 2, 4).programs for action in program]
    assert drawn.marks == len(drawn.rows) == len(actions)
    assert sorted(row[1] for row in drawn.rows) == sorted(actions)
    for before, after in zip(drawn.rows, drawn.rows[1:], strict=False):
        assert before[0] != after[0] or float(before[3]) <= float(after[2])


def test_large_runs_stay_small_pages(tmp_path):
    folder = make_folder(tmp_path / "run", plan=plan_of(pp=16, microbatches=256), num_steps=2000)
    result = {**RESULT, "peak_memory_bytes": [(1000 + rank) << 20 for rank in range(1024)]}
    (folder / "result.json").write_text(json.dumps(result))
    text = as_page([read_run(folder)])
    drawn = Page(text).sections
    assert len(text) < 2_000_000
    assert drawn["loss"].points == MOST_POINTS
    assert drawn["peaks"].marks == 3
    assert [row[0] for row in drawn["peaks"].rows] == [
        "least: rank 0",
        "median of 1024 ranks",
        "most: rank 1023",
    ]
    assert 0 < drawn["schedule"].marks <= MOST_BOXES
    assert {row[0] for row in drawn["schedule"].rows} >= {"0", "15"}
    assert "of 16 ranks are drawn" in drawn["schedule"].text


def test_what_a_folder_lacks_is_said_and_not_drawn(folder):
    for name in ("result.json", "verify.json", "plan.lock.json", "resolved.toml"):
        (folder / name).unlink()
    data = read_run(folder)
    absent = {figure.anchor for figure in figures_of(data) if isinstance(figure, Missing)}
    assert absent == {
        "suggestions", "memory", "peaks", "prediction", "breakdown", "schedule", "communication",
        "verify", "configuration", "environment",
    }  # fmt: skip
    drawn = Page(as_page([data])).sections
    assert all(drawn[name].marks == 0 and "Not shown: " in drawn[name].text for name in absent)
    assert verdict(data).startswith(
        "6 steps without a result, so the run goes on or it died: loss 5.5000 → 3.0000"
    )


def test_a_folder_of_a_run_that_just_began(folder):
    (folder / "metrics.jsonl").write_text('{"step": 1, "lo')  # cut by a crash
    (folder / "result.json").unlink()
    data = read_run(folder)
    assert verdict(data).startswith("no step is recorded with pp2 1f1b")
    assert "metrics.jsonl has no steps" in Page(as_page([data])).sections["loss"].text


def test_an_unknown_peak_gives_no_breakdown(folder):
    (folder / "result.json").write_text(json.dumps({**RESULT, "mfu": None, "hfu": None}))
    found = Page(as_page([read_run(folder)])).sections["breakdown"]
    assert found.marks == 0
    assert "the device's peak is unknown" in found.text


def test_what_a_plan_said_stands_beside_what_was_measured(folder):
    found = Page(as_page([read_run(folder)])).sections["prediction"]
    for text in ("predicted 0.4 s", "measured 0.5 s", "+20% of what was predicted, after 2 runs"):
        assert text in found.text
    rest = {name: value for name, value in RESULT.items() if name != "prediction"}
    (folder / "result.json").write_text(json.dumps(rest))
    assert "nothing was predicted" in Page(as_page([read_run(folder)])).sections["prediction"].text


def test_the_verdict_says_how_it_went(folder):
    assert verdict(read_run(folder)) == (
        "6 steps with pp2 1f1b · zero1x2 · micro 4 x accumulate 4 · bf16: loss 5.5000 → 3.0000, held-out 3.5000; "
        "2,048 tokens/s, 0.5 s a step (25% above the plan's), 40.0% MFU; "
        "memory 13.0 MiB a rank, 8.3% above prediction; "
        "NOT equal to one device, first in gradients."
    )


def test_a_result_of_verify_is_of_the_plan_that_was_verified(folder):
    (folder / "plan.lock.json").write_text(plan_of(schedule="gpipe").to_json())
    assert read_run(folder).verified is None


def test_a_check_that_compared_nothing_passes_for_none(page):
    found = page.sections["verify"]
    assert [row[:3] for row in found.rows] == [
        ["loss", "equal", "3"],
        ["ties", "nothing to compare", "0"],
        ["gradients", "2 wrong", "9"],
    ]
    assert found.text.count("✓ ") == 2  # in the picture and in its title
    assert found.text.count("✗ ") == 2


def test_texts_of_a_run_are_no_markup(folder):
    data = dataclasses.replace(read_run(folder), path=folder / "<b>&amp;")
    text = as_page([data])
    assert "<b>" not in text
    assert "&lt;w&gt;" in text  # the name of the wrong tensor
    assert Page(text).open == []


def test_settings_have_value_and_origin(page):
    assert page.sections["configuration"].rows == [
        ["model.source", '"preset:gpt-nano"', "run.toml:2"],
        ["train.stop_at", '"6 # not 7"', "command line"],
        ["train.seed", "1", "default"],
        ["train.global_batch", '"32 sequences"', "run.toml:7"],
        ["data.seq_len", "128", "run.toml:9"],
    ]


def test_runs_stand_side_by_side(folder, tmp_path):
    other = make_folder(tmp_path / "other", num_steps=3)
    (other / "result.json").write_text(json.dumps({**RESULT, "final_loss": 2.5, "mfu": None}))
    page = Page(as_page([read_run(folder), read_run(other)]))
    rows = {row[0]: row[1:] for row in page.sections["comparison"].rows}
    assert rows["last loss"] == ["3.0000", "2.5000"]
    assert rows["MFU"] == ["40.0%", "–"]
    assert (page.sections["loss-1"].points, page.sections["loss-2"].points) == (6, 3)
    assert len(page.anchors) == len(set(page.anchors))
