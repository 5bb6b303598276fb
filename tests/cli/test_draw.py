"""`meshwright draw` prints what `exchange/draw.py` makes, writes SVG, and refuses what it cannot draw."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], "E109", "one of --collective, --schedule and --graph"),
        (
            ["--collective", "ring", "--schedule", "1f1b"],
            "E109",
            "one of --collective, --schedule and --graph",
        ),
        (["--schedule", "1f1b", "--stages", "0"], "E230", "each is at least 1"),
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
