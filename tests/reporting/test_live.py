"""A served report: the page of now, a word when files change, and nothing else to anybody."""

import json
import re
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from meshwright.reporting.live import LiveReport
from tests.reporting.folders import Page, make_folder, steps

DEADLINE = 60


@contextmanager
def served(folder):
    with LiveReport([folder]) as live:
        thread = threading.Thread(target=live.serve, daemon=True)
        thread.start()
        try:
            yield live
        finally:
            live.stop()
            thread.join(DEADLINE)
            assert not thread.is_alive()


def get(url):
    with urllib.request.urlopen(url, timeout=DEADLINE) as answer:
        return answer.read().decode()


def refused(url, **options):
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, **options), timeout=DEADLINE)
    with caught.value as answer:
        return answer.code


def test_the_page_follows_the_files_and_open_pages_are_told(tmp_path):
    folder = make_folder(tmp_path / "run")
    with served(folder) as live:
        page = get(live.url)
        assert Page(page).sections["loss"].points == 6
        (events,) = re.findall(r"EventSource\('(events\?\w+)'\)", page)
        with urllib.request.urlopen(live.url + events, timeout=DEADLINE) as stream:
            assert stream.headers["Content-Type"] == "text/event-stream"
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({**steps(7)[6], "eval_loss": None}) + "\n")
            assert stream.readline() == b"data: changed\n"
        later = get(live.url)
        assert Page(later).sections["loss"].points == 7
        # A page that was loaded before the change asks after it, and is told at once.
        with urllib.request.urlopen(live.url + events, timeout=DEADLINE) as stream:
            assert stream.readline() == b"data: changed\n"


def test_nothing_else_is_answered(tmp_path):
    folder = make_folder(tmp_path / "run")
    with served(folder) as live:
        assert live.url.startswith("http://127.0.0.1:")
        root = live.url.rsplit("/", 2)[0]
        assert refused(f"{root}/") == 404
        assert refused(f"{root}/guess/") == 404
        assert refused(f"{live.url}../metrics.jsonl") == 404
        assert refused(live.url, data=b"x", method="POST") == 501
    with LiveReport([folder]) as other:
        assert other.url.rsplit("/", 2)[1] != live.url.rsplit("/", 2)[1]


def test_a_file_that_cannot_be_read_is_said_and_mended(tmp_path):
    folder = make_folder(tmp_path / "run")
    whole = (folder / "result.json").read_text()
    with served(folder) as live:
        (folder / "result.json").write_text(whole[:40])
        assert "E296" in get(live.url)
        assert "EventSource" in get(live.url)
        (folder / "result.json").write_text(whole)
        assert "memory" in Page(get(live.url)).sections
