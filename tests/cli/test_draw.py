"""`meshwright draw` prints what `exchange/draw.py` makes, writes SVG, and refuses what it cannot draw."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import ConfigError

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


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--collective", "rng"], "E114", "Did you mean 'ring'"),
        (["--collective", "ring", "--ranks", "13"], "E109", "1 to 12 ranks"),
        (["--collective", "ring", "--ranks", "0"], "E109", "at least 1"),
    ],
)
def test_refused(arguments, code, text):
    error = call(*arguments).exception
    assert isinstance(error, ConfigError)
    assert error.code == code
    assert text in error.message
