"""`meshwright draw` prints what `exchange/draw.py` makes, writes SVG, and refuses what it cannot draw."""

from __future__ import annotations

import gzip
import json
import xml.etree.ElementTree as ElementTree

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import MeshwrightError

RING = """\
all_reduce over 2 ranks (ring, 2 steps)
  rank 0    [a0 b0]  →  [Σa Σb]
  rank 1    [a1 b1]  →  [Σa Σb]
step 1   1→0 +a, 0→1 +b
  rank 0    [Σa b0]
  rank 1    [a1 Σb]
step 2   1→0 b, 0→1 a
  rank 0    [Σa Σb]
  rank 1    [Σa Σb]
"""
ALL_TO_ALL = """\
all_to_all over 3 ranks (pairwise, 2 steps)
  rank 0    [a0 b0 c0]  →  [a0 a1 a2]
  rank 1    [a1 b1 c1]  →  [b0 b1 b2]
  rank 2    [a2 b2 c2]  →  [c0 c1 c2]
"""
REDUCE_SCATTER = """\
reduce_scatter over 2 ranks (ring, 1 step)
  rank 0    [a0 b0]  →  [Σa · ]
  rank 1    [a1 b1]  →  [·  Σb]
"""


def call(*arguments):
    return CliRunner().invoke(app, ["draw", *arguments])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--collective", "ring", "--ranks", "2"], RING),
        (["--collective", "all-to-all", "--ranks", "3"], ALL_TO_ALL),
        (["--collective", "reduce_scatter", "--ranks", "2"], REDUCE_SCATTER),
    ],
)
def test_text(arguments, text):
    assert call(*arguments).stdout == text


def test_svg_has_a_block_for_each_chunk_rank_and_step(tmp_path):
    out = tmp_path / "ring.svg"
    assert call("--collective", "ring", "--ranks", "4", "--out", str(out)).stdout == f"wrote {out}\n"
    tags = [element.tag.rpartition("}")[2] for element in ElementTree.parse(out).iter()]
    assert tags.count("rect") == 1 + 7 * 4 * 4  # the page; start and six steps of four ranks with four chunks
    assert tags.count("line") == 6 * 4  # every rank sends once a step


def test_json():
    printed = json.loads(call("--collective", "parameter_server", "--ranks", "3", "--json").stdout)
    assert printed["chunks_sent"] == [1, 1, 1, 3]
    assert printed["steps"] == 4


def test_the_most_ranks_that_are_promised_have_letters_enough():
    for ranks_per_node in range(1, 13):
        result = call(
            "--collective", "hierarchical", "--ranks", "12", "--ranks-per-node", str(ranks_per_node)
        )
        assert result.exit_code == 0


ONE_F_ONE_B = """\
1f1b · 2 ranks · 3 micro-batches · bubble 25.0% of the step · activations kept 2 1
rank 0  F0 F1 ·· ·· B0 B0 F2 B1 B1 ·· B2 B2
rank 1  ·· F0 B0 B0 F1 B1 B1 F2 B2 B2 ·· ··
"""


def test_a_schedule_over_time():
    assert call("--schedule", "1f1b", "--stages", "2", "--microbatches", "3").stdout == ONE_F_ONE_B


def test_a_schedule_as_svg_and_csv(tmp_path):
    svg, csv = tmp_path / "zb.svg", tmp_path / "zb.csv"
    for out in (svg, csv):
        assert (
            call("--schedule", "zb-h1", "--stages", "3", "--microbatches", "4", "--out", str(out)).exit_code
            == 0
        )
    tags = [element.tag.rpartition("}")[2] for element in ElementTree.parse(svg).iter()]
    assert tags.count("g") == 3 * 4 * 3  # a box for each of F, I, W
    assert len(csv.read_text().splitlines()) == 3
    assert csv.read_text().startswith("0F0, 0F1, 0F2, 0I0, 0W0")


def test_a_schedule_as_json():
    printed = json.loads(
        call("--schedule", "gpipe", "--stages", "4", "--microbatches", "12", "--json").stdout
    )
    assert printed["bubble"] == pytest.approx(3 / 15)
    assert printed["activations"] == [12] * 4
    assert printed["programs"][3][0] == "3F0"


def test_a_schedule_with_times_of_its_stages():
    """The second stage is twice as slow, and the picture and the figures are of that."""
    arguments = ("--schedule", "gpipe", "--stages", "2", "--microbatches", "1", "--times", "1/1/1,2/2/2")
    assert call(*arguments).stdout.splitlines()[1:] == [
        "rank 0  F0 ·· ·· ·· ·· ·· ·· B0 B0",
        "rank 1  ·· F0 F0 B0 B0 B0 B0 ·· ··",
    ]
    printed = json.loads(call(*arguments, "--transfer", "0.5", "--json").stdout)
    assert printed["seconds"] == pytest.approx(9 + 2 * 0.5)
    assert printed["bubble"] == pytest.approx(1 - 9 / (2 * 10))


def test_a_searched_schedule_is_searched_for_its_times():
    arguments = ("--stages", "2", "--microbatches", "3", "--times", "3/1/1,1/1/1", "--json")
    seconds = {
        name: json.loads(call("--schedule", name, *arguments).stdout)["seconds"]
        for name in ("1f1b", "searched")
    }
    assert seconds["searched"] < seconds["1f1b"]


def test_a_searched_schedule_keeps_a_limit():
    arguments = ("--schedule", "searched", "--stages", "3", "--microbatches", "4", "--json")
    for keep in (1, 2):
        assert json.loads(call(*arguments, "--keep", str(keep)).stdout)["activations"] == [keep] * 3


def test_a_schedule_of_ones_own_comes_back(tmp_path):
    csv = tmp_path / "own.csv"
    for name in ("1f1b", "interleaved", "zb-v", "dualpipe"):
        sizes = ("--stages", "3", "--microbatches", "4", "--json")
        programs = json.loads(call("--schedule", name, *sizes, "--out", str(csv)).stdout)["programs"]
        printed = json.loads(call("--schedule", str(csv), "--json").stdout)
        assert (printed["schedule"], printed["programs"]) == ("own.csv", programs)


def test_a_schedule_with_replicas_and_its_trace(tmp_path):
    trace, zipped = tmp_path / "step.json", tmp_path / "step.json.gz"
    for out in (trace, zipped):
        result = call(
            *("--schedule", "1f1b", "--stages", "3", "--microbatches", "4", "--replicas", "2,3,1"),
            *("--samples", "6", "--trace", str(out)),
        )
        assert result.stdout.splitlines()[-2:] == [
            "stage 0 on 0 1 · stage 1 on 2 3 4 · stage 2 on 5 · 6 samples a micro-batch · 56 messages",
            f"wrote {out}",
        ]
    written = json.loads(trace.read_text())
    assert json.loads(gzip.decompress(zipped.read_bytes())) == written
    slices = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == set(range(6))
    assert sum(event["cat"] == "send_activation" for event in slices) == 4 * (
        4 + 3
    )  # pairs that share samples


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], "E109", "one of --collective, --schedule, --graph and --matmul"),
        (
            ["--collective", "ring", "--schedule", "1f1b"],
            "E109",
            "one of --collective, --schedule, --graph and --matmul",
        ),
        (["--schedule", "1f1b", "--stages", "0"], "E230", "each is at least 1"),
        (["--schedule", "searched", "--stages", "0"], "E230", "each is at least 1"),
        (
            ["--schedule", "1f1b", "--times", "1/2"],
            "E109",
            "one for each of the 4, e.g. 1/1/1 or 1/1/0.5,1/1/0.5,",
        ),
        (["--schedule", "1f1b", "--times", "1/1/1,1/1/1"], "E109", "one for each of the 4"),
        (["--schedule", "1f1b", "--times", "1/0/1"], "E109", "in seconds above 0"),
        (["--schedule", "1f1b", "--times", "a/b/c"], "E109", "in seconds above 0"),
        (["--schedule", "1f1b", "--transfer", "-1"], "E109", "0 or more"),
        (
            ["--schedule", "1f1b", "--replicas", "1,2"],
            "E109",
            "each of the 4 ranks of the pipeline, e.g. 2,2,2,2",
        ),
        (["--schedule", "1f1b", "--replicas", "1,0,1,1"], "E109", "how many ranks share the work"),
        (
            ["--schedule", "1f1b", "--replicas", "1,3,1,1", "--samples", "2"],
            "E232",
            "2 samples over 3 replicas",
        ),
        (["--collective", "ring", "--trace", "x.json"], "E109", "--trace is for schedules"),
        (["--collective", "rng"], "E114", "Did you mean 'ring'"),
        (["--collective", "ring", "--ranks", "13"], "E109", "1 to 12 ranks"),
        (["--collective", "ring", "--ranks", "0"], "E109", "at least 1"),
    ],
)
def test_refused(arguments, code, text):
    error = call(*arguments).exception
    assert isinstance(error, MeshwrightError)
    assert error.code == code
    assert text in error.message


def test_a_product_is_drawn_and_written(tmp_path):
    shown = call("--matmul", "hybrid", "--json")
    facts = json.loads(shown.output)
    assert (facts["matmul"], facts["ranks"]) == ("hybrid", 4)
    assert facts["shares"][3] == {"rows": [2, 4], "inner": [0, 5], "columns": [4, 8]}
    assert facts["text"].startswith("y = x·w on 4 ranks, hybrid")
    path = tmp_path / "column.svg"
    assert call("--matmul", "column", "--out", str(path)).exit_code == 0
    assert "y = x·w on 2 ranks, column" in path.read_text(encoding="utf-8")
