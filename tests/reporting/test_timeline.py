"""A pipeline's order planned over measured, where a run kept its times."""

import json

import pytest

from meshwright.errors import ConfigError
from meshwright.reporting.page import as_page
from meshwright.reporting.reading import read_run
from meshwright.reporting.timeline import schedule
from meshwright.schedule.catalogue import make_schedule
from meshwright.schedule.timing import Durations, run
from tests.reporting.folders import Page, make_folder, plan_of


def keep_times(folder, name="1f1b", *, places=2, microbatches=4, late=0.0):
    """As the ranks write them: stage 1 takes twice as long, on a clock that began long ago."""
    times = Durations((1.0, 2.0), (2.0, 4.0), (0.0, 0.0))
    lines = run(make_schedule(name, places, microbatches), times)
    (folder / "timeline").mkdir()
    for place, line in enumerate(lines):
        rows = [(str(item.action), 500 + item.start + late, 500 + item.end + late) for item in line]
        (folder / "timeline" / f"place-{place:04d}.json").write_text(json.dumps(rows))
    return lines


def test_measured_boxes_stand_under_planned_ones_in_seconds(tmp_path):
    folder = make_folder(tmp_path / "run")
    lines = keep_times(folder)
    figure = schedule(read_run(folder))
    assert figure.title == "Schedule of the pipeline, planned over measured: 1f1b"
    names = list(dict.fromkeys(row[0] for row in figure.rows))
    assert names == ["0 planned", "0 measured", "1 planned", "1 measured"]
    measured = [row[1:] for row in figure.rows if row[0] == "1 measured"]
    assert measured == [(str(item.action), item.start, item.end) for item in lines[1]]
    # Nothing but the order held these ranks up, so what is planned from their means is what they did.
    assert [row[1:] for row in figure.rows if row[0] == "1 planned"] == measured
    assert figure.num_marks == 4 * 8
    drawn = Page(as_page([read_run(folder)])).sections["schedule"]
    assert drawn.marks == figure.num_marks
    waiting = 1 - 4 * 9 / (2 * max(item.end for line in lines for item in line))
    assert f"{waiting:.1%} in the newest step" in figure.help


def test_times_of_another_schedule_or_a_run_that_goes_on_are_not_drawn(tmp_path):
    other = make_folder(tmp_path / "other", plan=plan_of(schedule="zb-h1"))
    keep_times(other)
    assert "were not kept" in schedule(read_run(other)).help
    more = make_folder(tmp_path / "more", plan=plan_of(microbatches=2))
    keep_times(more)
    assert "were not kept" in schedule(read_run(more)).help
    unfinished = make_folder(tmp_path / "unfinished")
    keep_times(unfinished)
    (unfinished / "result.json").unlink()
    assert "were not kept" in schedule(read_run(unfinished)).help


def test_a_file_of_times_that_cannot_be_read_is_named(tmp_path):
    folder = make_folder(tmp_path / "run")
    keep_times(folder)
    (folder / "timeline" / "place-0001.json").write_text("[[1, 2]]")
    with pytest.raises(ConfigError, match="E296"):
        read_run(folder)
