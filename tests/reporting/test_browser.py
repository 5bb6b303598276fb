"""The page in a real browser, where one is installed: a silent console, marks with area, no sideways scrolling."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest

from meshwright.reporting.figure import Figure
from meshwright.reporting.figures import figures_of
from meshwright.reporting.page import as_page
from meshwright.reporting.reading import read_run
from tests.reporting.folders import make_folder

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Asks two frames, as wide as a phone and as a desk, what they show.
ASK = """
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, marks = {};
    for (const section of page.querySelectorAll("section.figure"))
      marks[section.id] = [...section.querySelectorAll(".mark")].reduce((sum, mark) => sum + (mark.points ?
        mark.points.numberOfItems : mark.getBoundingClientRect().height > 0), 0);
    return {marks, beyond: page.documentElement.scrollWidth - page.documentElement.clientWidth,
      colour: getComputedStyle(page.body).backgroundColor,
      requests: frame.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name),
      focusable: page.querySelectorAll("summary").length};
  });
  document.getElementById("found").textContent = JSON.stringify(found);
};
"""


def shown(text: str, folder, *options: str) -> tuple[list[dict], str]:
    """What each frame shows, and all that the browser says."""
    frames = "".join(
        f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{html.escape(text)}"></iframe>'
        for width in (390, 1440)
    )
    path = folder / "frames.html"
    path.write_text(f'<meta charset="utf-8"><pre id="found"></pre><script>{ASK}</script>{frames}')
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--dump-dom",
    ]
    command += [f"--user-data-dir={folder / 'profile'}", *options, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr
    return json.loads(html.unescape(found[1])), done.stderr


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_browser_shows_what_was_recorded(tmp_path):
    data = read_run(make_folder(tmp_path / "run"))
    frames, said = shown(as_page([data]), tmp_path)
    expected = {figure.anchor: figure.num_marks for figure in figures_of(data) if isinstance(figure, Figure)}
    assert [frame["marks"] for frame in frames] == [expected, expected]
    assert [frame["beyond"] for frame in frames] == [0, 0]
    assert [frame["requests"] for frame in frames] == [[], []]
    assert [frame["focusable"] for frame in frames] == [len(expected)] * 2
    assert "CONSOLE" not in said


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_browser_in_the_dark_shows_a_dark_page(tmp_path):
    text = as_page([read_run(make_folder(tmp_path / "run"))])
    bright, _ = shown(text, tmp_path)
    dark, _ = shown(text, tmp_path, "--force-dark-mode", "--blink-settings=preferredColorScheme=0")
    assert bright[0]["colour"] == "rgb(255, 255, 255)"
    assert dark[0]["colour"] == "rgb(22, 24, 29)"
