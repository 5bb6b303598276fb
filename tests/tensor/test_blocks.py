"""Blocks of one product: published sizes, the picture, refusals, and the example that runs them."""

import runpy
import xml.etree.ElementTree as ElementTree

import pytest

from meshwright.errors import ConfigError
from meshwright.tensor.blocks import WAYS, as_svg, as_text, make_product
from tests.house.source import ROOT


@pytest.mark.parametrize(
    ("way", "ranks", "blocks"),
    [
        ("data", 2, ["x 2 x 5 · w 5 x 8 = 2 x 8"] * 2),
        ("column", 2, ["x 4 x 5 · w 5 x 4 = 4 x 4"] * 2),
        ("row", 2, ["x 4 x 3 · w 3 x 8 = 4 x 8", "x 4 x 2 · w 2 x 8 = 4 x 8"]),
        ("hybrid", 4, ["x 2 x 5 · w 5 x 4 = 2 x 4"] * 4),
    ],
)
def test_published_blocks(way, ranks, blocks):
    assert [share.describe() for share in make_product(way, ranks).shares] == blocks


def test_a_picture_says_who_holds_what():
    assert as_text(make_product("row", 2, rows=1, inner=3, columns=2)).splitlines() == [
        "y = x·w on 2 ranks, row",
        "x 1 x 3   w 3 x 2   y 1 x 2",
        "0 0 1     0 0       Σ Σ",
        "          0 0",
        "          1 1",
        "rank 0  x 1 x 2 · w 2 x 2 = 1 x 2",
        "rank 1  x 1 x 1 · w 1 x 2 = 1 x 2",
        "forward   all-reduce y",
        "backward  x_grad: nothing · w_grad: nothing",
    ]


@pytest.mark.parametrize("way", WAYS)
def test_an_svg_has_every_element(way):
    root = ElementTree.fromstring(as_svg(make_product(way, 4)))
    assert len(root.findall("{http://www.w3.org/2000/svg}rect")) == 1 + 4 * 5 + 5 * 8 + 4 * 8


@pytest.mark.parametrize(
    ("way", "ranks", "text"),
    [
        ("rows", 2, "--matmul 'rows' is neither of data, column, row, hybrid"),
        ("hybrid", 6, "--matmul hybrid --ranks 6: needs a square number of ranks"),
        ("data", 5, "--matmul data --ranks 5: x is 4 x 5 and w 5 x 8, so a rank would have nothing"),
        ("column", 0, "a rank would have nothing"),
    ],
)
def test_what_cannot_be_drawn_is_refused(way, ranks, text):
    with pytest.raises(ConfigError) as caught:
        make_product(way, ranks)
    assert caught.value.code == "E109"
    assert text in caught.value.message


def test_the_example_equals_one_device(ranks, monkeypatch, capsys):
    class WarmPool:
        def run(self, *arguments):
            return ranks.run(*arguments)

        def close(self):
            pass

    example = runpy.run_path(str(ROOT / "examples" / "matmul_four_ways.py"))
    monkeypatch.setitem(example["main"].__globals__, "RankPool", WarmPool)
    example["main"]()
    printed = capsys.readouterr().out
    assert printed.count("worst difference to one device") == 4
