"""`meshwright partition`: files of blocks, models, pictures and errors."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import MeshwrightError


def call(*arguments):
    return CliRunner().invoke(app, ["partition", *map(str, arguments)])


@pytest.fixture
def write(tmp_path):
    def written(blocks, **more):
        rows = [
            dict(zip(("forward", "backward", "param_bytes", "output_bytes"), row, strict=False))
            for row in blocks
        ]
        path = tmp_path / "blocks.json"
        path.write_text(json.dumps({"blocks": rows, **more}))
        return path

    return written


def test_blocks_exact_and_as_rannc(write):
    path = write([(9, 5), (5, 7), (9, 3)])
    exact = json.loads(call(path, "--devices", 4, "--stages", 3, "--json").stdout)
    assert (exact["value"], exact["optimum"], exact["gap"], exact["objective"]) == (14, 14, 0, "maxf+maxb")
    assert [(s["first"], s["last"], s["devices"]) for s in exact["stages"]] == [
        (0, 0, 1),
        (1, 1, 2),
        (2, 2, 1),
    ]
    assert exact["stages"][1]["forward_seconds"] == 2.5
    assert exact["blocks"] == 3
    faithful = json.loads(call(path, "--devices", 4, "--stages", 3, "--compat", "rannc", "--json").stdout)
    assert (faithful["value"], faithful["optimum"], faithful["gap"]) == (16, 14, 0.125)


def test_edges_memory_and_bandwidth(write):
    path = write([(4, 8, 0, 1), (4, 8, 0, 20), (4, 8, 0, 2), (4, 8)])
    found = json.loads(call(path, "--devices", 2, "--stages", 2, "--bandwidth", 1, "--json").stdout)
    assert (found["value"], found["stages"][1]["first"]) == (38, 1)
    path = write([(4, 8, 10), (4, 8, 1), (8, 16, 1), (8, 16, 1)])
    for replicas, value in (("any", 20), ("pow2", 30)):
        options = ("--devices", 4, "--stages", "2..2", "--memory", 10, "--replicas", replicas, "--json")
        assert json.loads(call(path, *options).stdout)["value"] == value


def test_a_model_in_stages(tmp_path, monkeypatch):
    picture = tmp_path / "plan.svg"
    graph = tmp_path / "nano.json"
    CliRunner().invoke(app, ["draw", "--graph", "gpt-nano", "--out", str(graph)])
    options = ("--devices", 4, "--batch", 8, "--stages", "2..4", "--machine", "v100")
    printed = json.loads(call(graph, *options, "--out", picture, "--json").stdout)
    assert sum(stage["devices"] for stage in printed["stages"]) == 4
    assert printed["atomic"] > 50
    assert printed["gap"] == 0
    assert printed["step_gap"] < 0.1
    assert 2 <= len(printed["stages"]) <= 4
    assert "token_embedding" in printed["modules"][0]
    bars = [node for node in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}rect")]
    assert len(bars) >= 2 * len(printed["stages"])
    assert len(list(ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}g"))) == 3
    text = picture.read_text()
    # a repeated block once, constants dashed beside their parts, borders of as many blocks as there are
    assert "4 times, parts of the first" in text
    assert "arange, embedding, weight" in text
    assert text.count(">scaled_dot_product_attention<") == 1  # of four layers
    assert f"cheapest cuts: {printed['blocks']}" in text
    tied = json.loads(call(graph, *options, "--ties", "best", "--json").stdout)
    assert tied["ties_in_one_stage"] == []  # the head reads the embedding: one stage would have all
    unlike = json.loads(call(graph, *options, "--speeds", "1,3,3,3", "--json").stdout)
    by_speed = dict(zip(unlike["speeds"], unlike["stages"], strict=True))
    assert set(by_speed) == {1, 3}
    assert unlike["step_seconds"] < printed["step_seconds"]
    error = call(graph, *options, "--speeds", "1,3,3,3", "--ties", "best").exception
    assert isinstance(error, MeshwrightError)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = json.loads(call(graph, *options, "--costs", "measured", "--json").stdout)
    assert sum(stage["devices"] for stage in measured["stages"]) == 4
    assert measured["value"] != printed["value"]
    assert len(list(tmp_path.rglob("block-seconds/*.json"))) == 1


@pytest.mark.parametrize("speeds", ["1,1,2,2", "1,2,1,2", "2,2,1,1"])
def test_unlike_devices_in_their_best_order(write, speeds):
    path = write([(3, 0)] * 6 + [(2, 0)] * 2)
    options = ("--devices", 4, "--stages", 4, "--objective", "maxfb", "--speeds", speeds, "--json")
    found = json.loads(call(path, *options).stdout)
    assert found["value"] == 4.5
    assert sorted(found["speeds"]) == [1, 1, 2, 2]
    # blocks of a stage take their seconds by its own speed
    works = [(3 * min(s["last"] + 1, 6) + 2 * max(s["last"] - 5, 0)) for s in found["stages"]]
    for stage, speed, done, before in zip(found["stages"], found["speeds"], works, [0, *works], strict=False):
        assert stage["forward_seconds"] == pytest.approx((done - before) / speed)


@pytest.mark.parametrize(("size", "together"), [(1, []), (100, [0])])
def test_shared_weights_in_their_best_way(write, size, together):
    path = write([(1, 1)] * 4, ties=[{"users": [0, 2], "bytes": size}])
    options = (
        "--devices",
        2,
        "--stages",
        2,
        "--objective",
        "maxfb",
        "--bandwidth",
        10,
        "--ties",
        "best",
        "--json",
    )
    assert json.loads(call(path, *options).stdout)["ties_in_one_stage"] == together


@pytest.mark.parity
def test_a_model_as_rannc_cuts_it():
    faithful = json.loads(
        call("gpt-nano", "--devices", 4, "--batch", 8, "--compat", "rannc", "--json").stdout
    )
    assert faithful["mode"] == "rannc"
    assert faithful["blocks"] <= 30


def test_text_has_a_bar_a_stage(write):
    text = call(write([(9, 5), (5, 7), (9, 3)]), "--devices", 3, "--stages", 3).stdout
    assert "no plan is better" in text
    assert text.count("FB") == 3


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--devices", 1, "--memory", 3), "E270", "lacks 2 bytes"),
        (("--devices", 2, "--stages", 3), "E271", "At most 2 stages are possible"),
        (("--devices", 2, "--stages", "3..1"), "E109", "a number or a range of them"),
        (("--devices", 2, "--objective", "min"), "E109", "neither of maxf+maxb, maxfb, 1f1b"),
        (("--devices", 2, "--compat", "alpa"), "E109", "neither of rannc"),
        (("--devices", 2, "--speeds", "1"), "E109", "a number above 0 for each of 2 devices"),
        (("--devices", 2, "--speeds", "1,2", "--compat", "rannc"), "E109", "knows one kind of device"),
        (("--devices", 2, "--speeds", "1,2", "--ties", "best"), "E109", "one at a time"),
        (("--devices", 2, "--costs", "guessed"), "E109", "neither of roofline, measured"),
        (("--devices", 2, "--costs", "measured"), "E109", "a file of blocks has its own seconds"),
    ],
)
def test_refused(write, options, code, text):
    error = call(write([(1, 1, 2), (1, 1, 3)]), *options).exception
    assert isinstance(error, MeshwrightError)
    assert (error.code, error.exit_code) == (code, 3 if code == "E270" else 2)
    assert text in error.message


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("{", "Expecting"),
        ("[]", 'no object with a list "blocks"'),
        ('{"blocks": []}', "it has no block"),
        ('{"blocks": [{"forward": 1}]}', "block 0 has forward; known are forward, backward"),
        ('{"blocks": [{"forward": -1, "backward": 1}]}', "block 0, forward is -1.0"),
        ('{"blocks": [{"forward": 1, "backward": 1}], "edges": [[0, 0, 1]]}', "does not point from a block"),
    ],
)
def test_files_that_are_none(tmp_path, raw, text):
    path = tmp_path / "blocks.json"
    path.write_text(raw.replace("-1", "-1.0"))
    error = call(path, "--devices", 1).exception
    assert isinstance(error, MeshwrightError)
    assert error.code == "E272"
    assert text in error.message


def test_a_file_that_is_missing():
    error = call("lost.json", "--devices", 1).exception
    assert isinstance(error, MeshwrightError)
    assert error.code == "E100"
