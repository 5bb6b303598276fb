"""Looking for processes that a launcher left behind."""

import os
import time
from collections.abc import Callable
from pathlib import Path


def processes_where(accept: Callable[[Path], bool]) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and int(folder.name) != os.getpid() and accept(folder):
                found.append(f"{folder.name}: {(folder / 'cmdline').read_bytes()[:200]!r}")
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def lines_starting(text: str, *starts: str) -> list[str]:
    """Lines of an output that begin so."""
    return [line for line in text.splitlines() if line.startswith(starts)]
