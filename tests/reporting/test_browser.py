"""The page in a real browser: silent, alone, and with marks that are the numbers of the run, light and dark, at two
widths."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

import meshwright
from meshwright.reporting.figure import Figure
from meshwright.reporting.figures import figures_of
from meshwright.reporting.page import as_page
from meshwright.reporting.reading import read_run
from meshwright.schedule.catalogue import make_schedule
from meshwright.schedule.timing import Durations, makespan, run
from meshwright.training.config import RunConfig
from tests.reporting.browsers import Seen, View, find_browser, look
from tests.reporting.folders import RESULT, make_folder, steps

PHONE, DESK = 390, 1440
# Of marks; the lightest colour of the palette on white has 2.2. Text: WCAG 2.1, 1.4.3.
LEAST_CONTRAST, LEAST_TEXT_CONTRAST = 2.0, 4.5
# Every mark where it is shown, every text with its place, the page's own sizes.
ASK = """
(() => {
  const box = (element) => {
    const r = element.getBoundingClientRect();
    return [r.left, r.top, r.right, r.bottom];
  };
  const colour = (element) => {
    const style = getComputedStyle(element);
    return style.fill === "none" ? style.stroke : style.fill;
  };
  const points = (line) => [...line.points].map((p) => {
    const at = p.matrixTransform(line.getScreenCTM());
    return [at.x, at.y];
  });
  const figures = {};
  for (const section of document.querySelectorAll("section.figure")) {
    const drawing = section.querySelector("svg");
    const all = (query) => drawing ? [...drawing.querySelectorAll(query)] : [];
    figures[section.id] = {
      frame: drawing && box(drawing),
      marks: all(".mark").map((mark) => ({
        tag: mark.tagName, box: box(mark), own: [mark.getBBox().width, mark.getBBox().height],
        colour: colour(mark), title: mark.querySelector("title")?.textContent,
        points: mark.points ? points(mark) : []})),
      grid: all(".grid").map(box),
      texts: all("text").map((text) => ({text: text.textContent, box: box(text), colour: colour(text)})),
      rows: section.querySelectorAll("tbody tr").length,
    };
  }
  const paragraphs = [...document.querySelectorAll("h1, h2, p, nav, summary, th, td")];
  return JSON.stringify({
    figures, ground: getComputedStyle(document.body).backgroundColor,
    words: paragraphs.filter((one) => one.getClientRects().length).map((one) => getComputedStyle(one).color),
    height: document.documentElement.scrollHeight,
    beyond: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    width: innerWidth, focusable: document.querySelectorAll("summary").length,
  });
})()
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = find_browser()
    if not found:
        pytest.skip("no browser is installed (extra `browser`, or Chromium on the path)")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def seen(browser, folder) -> dict[tuple[int, bool], Seen]:
    """By width and darkness; one start of the browser for all tests."""
    page = folder.parent / "page.html"
    page.write_text(as_page([read_run(folder)]), encoding="utf-8")
    views = [View(str(page), width, dark) for width, dark in ((PHONE, False), (DESK, False), (DESK, True))]
    found = look(browser, views, ASK, folder.parent)
    return {(view.width, view.dark): one for view, one in zip(views, found, strict=True)}


def luminance(colour: str) -> float:
    """Relative, of "rgb(r, g, b)"; WCAG 2.1."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_page_is_silent_asks_for_nothing_and_has_its_marks(folder, seen):
    figures = [figure for figure in figures_of(read_run(folder)) if isinstance(figure, Figure)]
    for (width, _), one in seen.items():
        assert one.said == ()
        assert one.requests == ()
        assert one.answer["width"] == width
        assert one.answer["beyond"] == 0
        assert one.answer["focusable"] == len(figures)
        for figure in figures:
            shown = one.answer["figures"][figure.anchor]
            marks = [len(mark["points"]) or 1 for mark in shown["marks"]]
            assert sum(marks) == figure.num_marks
            assert shown["rows"] == len(figure.rows)
            assert bool(figure.drawing) == bool(shown["marks"])


def test_no_mark_is_empty_and_none_leaves_its_figure(seen):
    for one in seen.values():
        for name, figure in one.answer["figures"].items():
            for mark in figure["marks"]:
                assert max(mark["own"]) > 0, (name, mark)
                if mark["tag"] != "polyline":  # that of equal values is flat
                    assert min(mark["own"]) > 0, (name, mark)
                left, top, right, bottom = mark["box"]
                assert left >= figure["frame"][0] - 6, (name, mark)  # half a circle, half a line
                assert right <= figure["frame"][2] + 6, (name, mark)
                assert top >= figure["frame"][1] - 6, (name, mark)
                assert bottom <= figure["frame"][3] + 6, (name, mark)


def test_colours_stand_out_from_the_ground_and_dark_is_dark(seen):
    for (_, dark), one in seen.items():
        ground = one.answer["ground"]
        assert luminance(ground) < 0.05 if dark else ground == "rgb(255, 255, 255)"
        for name, figure in one.answer["figures"].items():
            for mark in figure["marks"]:
                assert contrast(mark["colour"], ground) >= LEAST_CONTRAST, (name, mark["colour"])
            for text in figure["texts"]:
                assert contrast(text["colour"], ground) >= LEAST_TEXT_CONTRAST, (name, text)
        assert min(contrast(colour, ground) for colour in one.answer["words"]) >= LEAST_TEXT_CONTRAST
        memory = {mark["title"].split(": ")[1].split()[0]: mark["colour"] for mark in marks_of(one, "memory")}
        assert contrast(memory["predicted"], memory["measured"]) > 1.4


def test_texts_stay_in_their_figures_and_off_each_other(seen):
    for one in seen.values():
        for name, figure in one.answer["figures"].items():
            for text in figure["texts"]:
                assert text["box"][0] >= figure["frame"][0] - 1, (name, text)
                assert text["box"][2] <= figure["frame"][2] + 1, (name, text)
            for a, b in ((a, b) for a in figure["texts"] for b in figure["texts"] if a is not b):
                apart_x = a["box"][2] <= b["box"][0] or b["box"][2] <= a["box"][0]
                apart_y = a["box"][3] <= b["box"][1] + 3 or b["box"][3] <= a["box"][1] + 3
                assert apart_x or apart_y, (name, a["text"], b["text"])


def test_lines_do_not_run_through_numbers(seen):
    for one in seen.values():
        for name, figure in one.answer["figures"].items():
            for line in (mark for mark in figure["marks"] if mark["points"]):
                for (x0, y0), (x1, y1) in pairwise(line["points"]):
                    for part in range(11):
                        x, y = x0 + (x1 - x0) * part / 10, y0 + (y1 - y0) * part / 10
                        for text in figure["texts"]:
                            left, top, right, bottom = text["box"]
                            assert not (left < x < right and top + 2 < y < bottom - 2), (name, text["text"])


def marks_of(one: Seen, name: str) -> list[dict]:
    return one.answer["figures"][name]["marks"]


def lengths(one: Seen, name: str) -> list[float]:
    """Of bars, as parts of the figure's width."""
    frame = one.answer["figures"][name]["frame"]
    return [mark["own"][0] / (frame[2] - frame[0]) for mark in marks_of(one, name)]


def test_bars_are_as_long_as_what_was_recorded(seen):
    memory = RESULT["memory_bytes"]
    sizes = [
        memory[kind][name]
        for name in ("weights", "optimizer", "communication")
        for kind in ("predicted", "measured")
        if memory[kind][name]
    ]
    sent = [entry["bytes"] for entry in RESULT["communication"]]
    said = RESULT["prediction"]
    parts = [said["step_seconds"], RESULT["step_seconds_median"], 0.3, 0.1]
    for one in seen.values():
        for name, values in (
            ("memory", sizes),
            ("peaks", RESULT["peak_memory_bytes"]),
            ("communication", sent),
            ("prediction", parts),
            ("breakdown", [0.2, 0.05, 0.25]),
            ("verify", [3, 9]),  # a check that compared nothing has no bar
        ):
            expected = [value / max(values) for value in values]
            assert lengths(one, name) == pytest.approx(expected, abs=1e-3), name


def test_points_of_curves_are_where_their_values_are(seen):
    for one in seen.values():
        for name, key in (("loss", "loss"), ("gradient-norm", "grad_norm")):
            values = [(line["step"], line[key]) for line in steps() if line[key] is not None]
            low, high = min(value for _, value in values), max(value for _, value in values)
            figure = one.answer["figures"][name]
            (line,) = (mark for mark in figure["marks"] if mark["tag"] == "polyline")
            top, floor = figure["grid"][0][1], figure["grid"][-1][1]
            left, _, right, _ = figure["frame"]
            assert len(line["points"]) == len(values)
            for (x, y), (step, value) in zip(line["points"], values, strict=True):
                assert (floor - y) / (floor - top) == pytest.approx((value - low) / (high - low), abs=0.01)
                assert (x - left) / (right - left) == pytest.approx((step - 1) / 5, abs=0.01)
        held = next(mark for mark in marks_of(one, "loss") if mark["tag"] == "circle")
        assert held["title"] == "step 6: 3.5"
        loss = one.answer["figures"]["loss"]
        top, floor = loss["grid"][0][1], loss["grid"][-1][1]
        middle = (held["box"][1] + held["box"][3]) / 2
        assert (floor - middle) / (floor - top) == pytest.approx((3.5 - 3) / 2.5, abs=0.01)


def test_boxes_of_the_schedule_are_its_actions(seen):
    made = make_schedule("1f1b", 2, 4)
    times = Durations.equal(2)
    expected = [item for line in run(made, times) for item in line]
    for one in seen.values():
        figure = one.answer["figures"]["schedule"]
        left, _, right, _ = figure["frame"]
        scale = (right - left) / makespan(made, times)
        assert len(figure["marks"]) == len(expected) == 16
        for mark, item in zip(figure["marks"], expected, strict=True):
            assert mark["title"].endswith(f" {item.action}")
            assert mark["own"][0] == pytest.approx((item.end - item.start) * scale, rel=0.01)
        rows = sorted({round(mark["box"][1]) for mark in figure["marks"]})
        assert len(rows) == 2
        assert all(b - a >= 16 for a, b in pairwise(rows))
        colours = {
            item.action.op: mark["colour"] for mark, item in zip(figure["marks"], expected, strict=True)
        }
        assert len(set(colours.values())) == 2


def test_what_a_page_says_and_asks_for_is_seen(browser, tmp_path):
    """The browser itself: a page that is not silent, nor alone."""
    page = tmp_path / "loud.html"
    page.write_text('<script>console.error("aloud"); missing()</script><img src="http://127.0.0.1:9/x.png">')
    (one,) = look(browser, [View(str(page), PHONE, True)], "JSON.stringify(innerWidth)", tmp_path)
    assert json.dumps(one.answer) == "390"
    assert any("aloud" in text for text in one.said)
    assert any("missing is not defined" in text for text in one.said)
    assert one.requests == ("http://127.0.0.1:9/x.png",)


def test_pictures_of_plans_keep_their_marks_and_texts(browser, tmp_path):
    """In a dark notebook: pictures have their own ground, the table takes the page's colours."""
    plans = meshwright.plan("llama-3.1-8b", cluster="16xh100", global_batch=64, seq_len=8192)
    pictures = {"front": plans.pareto(), "gantt": plans.gantt(2)}
    body = "".join(
        f'<section class="figure" id="{name}">{made.svg}</section>' for name, made in pictures.items()
    )
    page = tmp_path / "notebook.html"
    style = "background:rgb(17, 17, 17);color:rgb(238, 238, 238)"
    page.write_text(f'<meta charset="utf-8"><body style="{style}">{plans._repr_html_()}{body}</body>')
    (one,) = look(browser, [View(str(page), DESK, True)], ASK, tmp_path)
    seen = {(DESK, True): one}
    assert one.said == one.requests == ()
    test_no_mark_is_empty_and_none_leaves_its_figure(seen)
    test_texts_stay_in_their_figures_and_off_each_other(seen)
    assert len(marks_of(one, "front")) == len(pictures["front"].rows)
    assert (
        min(contrast(colour, one.answer["ground"]) for colour in one.answer["words"]) >= LEAST_TEXT_CONTRAST
    )


@pytest.mark.parity
@pytest.mark.parametrize("plan", ["pp=2,schedule=zb-h1,micro_batch=2", "zero=1,recompute=full"])
def test_reports_of_real_runs(browser, tmp_path, plan):
    """Two processes train; what their files say is what the page shows."""
    source = {"source": "gpt-nano", "num_layers": 2, "dim": 32, "num_heads": 2, "ffn_dim": 48}
    train = {"global_batch": 8, "stop_at": "4 steps", "eval_every": "2 steps", "eval_samples": 8}
    config = RunConfig.model_validate({"model": source, "data": {"seq_len": 16}, "train": train})
    result = meshwright.train(config, plan=plan, processes=2, out=tmp_path / "run")
    page = result.report()
    views = [View(str(page), width, dark) for width, dark in ((PHONE, False), (DESK, True))]
    seen = {
        (view.width, view.dark): one
        for view, one in zip(views, look(browser, views, ASK, tmp_path), strict=True)
    }
    test_the_page_is_silent_asks_for_nothing_and_has_its_marks(page.parent, seen)
    test_no_mark_is_empty_and_none_leaves_its_figure(seen)
    test_texts_stay_in_their_figures_and_off_each_other(seen)
    test_lines_do_not_run_through_numbers(seen)
    recorded = json.loads((page.parent / "result.json").read_text())
    losses = [json.loads(line)["loss"] for line in (page.parent / "metrics.jsonl").read_text().splitlines()]
    for one in seen.values():
        peaks = recorded["peak_memory_bytes"]
        assert lengths(one, "peaks") == pytest.approx([size / max(peaks) for size in peaks], abs=1e-3)
        sent = [entry["bytes"] for entry in recorded["communication"] if entry["bytes"]]
        assert lengths(one, "communication") == pytest.approx([size / max(sent) for size in sent], abs=1e-3)
        (line,) = (mark for mark in marks_of(one, "loss") if mark["tag"] == "polyline")
        heights = [y for _, y in line["points"]]
        order = sorted(range(4), key=lambda step: losses[step])
        assert order == sorted(range(4), key=lambda step: -heights[step])
        assert ("schedule" in one.answer["figures"]) == plan.startswith("pp")
