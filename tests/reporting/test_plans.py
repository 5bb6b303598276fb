"""Plans in a notebook: their drawings hold what the plans say."""

from __future__ import annotations

import re
import xml.etree.ElementTree as tree
from dataclasses import replace

import pytest

from meshwright.mesh import MeshSpec
from meshwright.planner.asking import ask
from meshwright.planner.plans import describe, make_plans
from meshwright.reporting.plans import (
    MOST_BOXES,
    MOST_IN_ROW,
    coordinates,
    draw_front,
    draw_schedule,
    plans_table,
)
from meshwright.schedule.timing import makespan
from meshwright.simulation.host import host_step
from meshwright.simulation.job import Layout
from meshwright.simulation.pipeline import pipeline_of
from tests.simulation.test_host import WORK, host, place

NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def found():
    run = {"model": {"source": "llama-3.1-70b"}, "data": {"seq_len": 8192}, "train": {"global_batch": 512}}
    return make_plans(ask(run, {"cluster": "64xh100"}))


def test_the_table_has_a_bar_of_memory_a_plan(found):
    page = plans_table(found)
    rows = tree.fromstring(page.replace("<br>", "<br/>")).findall(".//tbody/tr")
    assert len(rows) == len(found.plans) == 5
    for row, item in zip(rows, found.plans, strict=True):
        bars = [mark for mark in row.iter("rect") if mark.get("class") == "mark"]
        sizes = [value for value in vars(item.predicted.memory).values() if value]
        widths = [float(mark.get("width")) for mark in bars]
        assert widths == pytest.approx([240 * size / found.request.usable_bytes for size in sizes], abs=0.01)
        starts = [float(mark.get("x")) for mark in bars]
        assert starts[1:] == pytest.approx(
            [a + b for a, b in zip(starts, widths, strict=True)][:-1], abs=0.02
        )
        assert f"{item.predicted.memory.peak / 2**30:.1f} GiB" in "".join(row.itertext())
    assert not re.search(r"https?://|<script|<link|url\(", page)


def test_the_map_says_which_rank_is_what(found):
    layout = Layout(dp=4, tp=4, pp=4)
    mesh = MeshSpec.of(pp=4, dp_replicate=1, dp_shard=4, cp=1, tp=4)
    for rank in range(64):
        place, own = coordinates(layout, rank), mesh.coordinates(rank)
        assert (place["pp"], place["dp"], place["tp"]) == (own["pp"], own["dp_shard"], own["tp"])
    inside = replace(layout, pipeline_inside=True)
    assert [coordinates(inside, rank)["pp"] for rank in (0, 4, 8, 12, 16)] == [0, 1, 2, 3, 0]
    only = replace(
        found, plans=(replace(found.best, predicted=replace(found.best.predicted, layout=layout)),)
    )
    squares = re.findall(r'fill="(#\w+)" fill-opacity="([\d.]+)"><title>([^<]*)<', plans_table(only))
    assert len(squares) == 64
    assert [text for _, _, text in squares][17] == "rank 17: tp 1 dp 0 pp 1"
    assert len({colour for colour, _, _ in squares}) == 4
    assert [shade for _, shade, _ in squares[:8]] == ["1"] * 4 + ["0.6"] * 4


def test_the_front_has_a_point_a_layout_and_plans_their_numbers(found):
    picture = draw_front(found)
    drawing = tree.fromstring(picture.svg)
    points = [
        (float(mark.get("cx")), float(mark.get("cy")))
        for mark in drawing.iter(f"{NAMESPACE}circle")
        if mark.get("class") == "mark"
    ]
    assert len(points) == len(found.front) == len(picture.rows) > 3
    times = [item.seconds for item in found.front]
    # In proportion: a third point lies between two others as its time does.
    for (x, _), seconds in zip(points, times, strict=True):
        part = (seconds - times[0]) / (times[-1] - times[0])
        assert x == pytest.approx(points[0][0] + part * (points[-1][0] - points[0][0]), abs=0.2)
    assert [y for _, y in points] == sorted(y for _, y in points)  # less memory lies further down
    numbers = [mark.text for mark in drawing.iter(f"{NAMESPACE}text") if mark.get("fill") == "#a03c00"]
    assert sorted(",".join(numbers).split(",")) == ["1", "2", "3", "4", "5"]
    assert picture.lines[0].endswith(describe(found.front[0].layout))
    twice = draw_front(replace(found, plans=(found.best, found.best)))
    assert ">1,2</text>" in twice.svg  # at one place


def test_a_schedule_is_drawn_of_one_stage_and_of_several(found, tmp_path):
    one, two = Layout(dp=8, tp=8), Layout(dp=4, tp=8, pp=2, schedule="zb-v", micro_batch=2)
    for layout in (one, two):
        picture = draw_schedule(found.request, layout)
        boxes = [mark for mark in tree.fromstring(picture.svg).iter(f"{NAMESPACE}g")]
        assert len(boxes) == len(picture.rows)
        assert {row[0] for row in picture.rows} == set(range(layout.pp))
    assert "2 ranks · 4 stages · 53 micro-batches" in repr(picture)
    assert picture.save(tmp_path / "plan.svg").read_text() == picture._repr_svg_() == picture.svg


def test_of_a_long_step_the_first_micro_batches_are_drawn():
    run = {"model": {"source": "gpt3-175b"}, "data": {"seq_len": 2048}, "train": {"global_batch": 1536}}
    request = ask(run, {"cluster": "64xa100"})
    for name in ("zb-v", "dualpipe", "zb-h1"):
        drawn = draw_schedule(request, Layout(tp=8, pp=8, schedule=name)).rows
        assert len(drawn) <= MOST_BOXES
        assert max(sum(row[0] == rank for row in drawn) for rank in range(8)) <= MOST_IN_ROW
    picture = draw_schedule(request, Layout(tp=8, pp=8))
    assert len(picture.rows) <= MOST_BOXES
    assert picture.lines[-1] in picture.svg  # a notebook shows no lines
    assert picture.lines[-1].startswith(
        "drawn: 160 of 1,536 micro-batches, as if they were all; of the whole step"
    )
    assert len({row[1] for row in picture.rows if row[0] == 0 and row[1].startswith("0F")}) == 160


def test_a_pipeline_of_a_measured_host_has_its_times():
    layout = Layout(pp=2, micro_batch=4)
    where = place(layout, host())
    made = pipeline_of(WORK, layout, where)
    step = host_step(WORK, layout, where)
    assert makespan(made.schedule, made.durations) == pytest.approx(step.total)
    single = Layout(micro_batch=16)
    made = pipeline_of(WORK, single, place(single, host()))
    assert makespan(made.schedule, made.durations) == pytest.approx(32 * (4 * 3e-3 + 0.5e-3))
