"""The browser that is here: Chromium on the path, told what to do over a pipe; else Chromium inside Qt, as a process.

Both open pages as wide as asked, light or dark, ask each the same question, and say what was logged and requested.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HEIGHT = 900
# A browser that says nothing for so long never will.
HANGS_SECONDS = 240


@dataclass(frozen=True)
class View:
    """One way to look at a page: its file, the window's width in pixels, dark or light, where a picture goes."""

    page: str
    width: int
    dark: bool
    picture: str = ""


@dataclass(frozen=True)
class Seen:
    """What the page answered, what the console was told, what was requested beside the page."""

    answer: Any
    said: tuple[str, ...]
    requests: tuple[str, ...]


def find_browser() -> str:
    """A binary, `qt`, or nothing; Qt counts if it starts, for a host may lack what it links to."""
    binary = next(filter(None, map(shutil.which, NAMES)), "")
    if binary or not importlib.util.find_spec("PyQt6"):
        return binary
    return "qt" if _start_qt([], "", dark=False).returncode == 0 else ""


def look(browser: str, views: Sequence[View], ask: str, folder: Path) -> list[Seen]:
    """What each view shows; `ask` is an expression of JavaScript whose value is JSON text."""
    if browser == "qt":
        found = {}
        for dark in (False, True):
            chosen = [view for view in views if view.dark == dark]
            found |= dict(zip(chosen, _look_with_qt(chosen, ask, dark=dark), strict=True)) if chosen else {}
        return [found[view] for view in views]
    with Chromium(browser, folder / "profile") as chromium:
        return [chromium.look(view, ask) for view in views]


def _look_with_qt(views: Sequence[View], ask: str, *, dark: bool) -> list[Seen]:
    done = _start_qt(views, ask, dark=dark)
    assert done.returncode == 0, done.stderr
    return [
        Seen(json.loads(one["answer"]), tuple(one["said"]), tuple(one["requests"]))
        for one in json.loads(done.stdout)
    ]


def _start_qt(views: Sequence[View], ask: str, *, dark: bool) -> subprocess.CompletedProcess[str]:
    scheme = " --blink-settings=preferredColorScheme=0" if dark else ""
    environment = {
        **os.environ,
        "QT_QPA_PLATFORM": "offscreen",
        "QTWEBENGINE_CHROMIUM_FLAGS": f"--no-sandbox --disable-gpu{scheme}",
    }
    order = json.dumps({"ask": ask, "views": [asdict(view) for view in views]})
    command = [sys.executable, str(Path(__file__).with_name("qt_browser.py"))]
    return subprocess.run(
        command,
        input=order,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=HANGS_SECONDS,
    )


class Chromium:
    """A browser without a window; a context, at whose end it is gone."""

    def __init__(self, binary: str, profile: Path) -> None:
        to_it, from_here = os.pipe()
        from_it, to_here = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        # The browser reads from descriptor 3 and writes to 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{to_it} 4>&{to_here}', "bash", binary, *flags]
        self._process = subprocess.Popen(
            [*shell, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_it, to_here),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_it)
        os.close(to_here)
        self._out = os.fdopen(from_here, "wb", buffering=0)
        self._in = os.fdopen(from_it, "rb", buffering=0)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._in.close()

    def look(self, view: View, ask: str) -> Seen:
        """Open one page in a tab of its own."""
        target = self._tell("Target.createTarget", url="about:blank")["targetId"]
        session = self._tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log", "Network"):
            self._tell(f"{part}.enable", session)
        size = {"width": view.width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self._tell("Emulation.setDeviceMetricsOverride", session, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if view.dark else "light"}
        self._tell("Emulation.setEmulatedMedia", session, features=[scheme])
        self._events.clear()
        url = Path(view.page).as_uri()
        self._tell("Page.navigate", session, url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._message())
        value = self._tell("Runtime.evaluate", session, expression=ask, returnByValue=True)
        said = [
            json.dumps(event["params"])
            for event in self._events
            if event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        ]
        requested = (
            event["params"]["request"]["url"]
            for event in self._events
            if event["method"] == "Network.requestWillBeSent"
        )
        return Seen(
            json.loads(value["result"]["value"]), tuple(said), tuple(u for u in requested if u != url)
        )

    def _tell(self, method: str, session: str = "", **params: object) -> dict[str, Any]:
        number = next(self._numbers)
        order = {"id": number, "method": method, "params": params}
        self._out.write(json.dumps(order | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._events.append(message)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._in], [], [], HANGS_SECONDS)[0], "the browser says nothing"
            read = os.read(self._in.fileno(), 1 << 16)
            assert read, "the browser has ended"
            self._rest += read
        text, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found
