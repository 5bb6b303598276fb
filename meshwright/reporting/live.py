"""The report of a run that goes on: the same page, served to this machine alone, and again whenever a file changes.

Owns the server: it answers GET on one random path, on the loopback interface, writes nothing, and tells open pages by
server-sent events that a file of the run has changed; they load themselves again.
Simplification: each open page is a thread that looks at the files' times once a second.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.reporting.page import as_page
from meshwright.reporting.reading import CONFIG, METRICS, PLAN, RESULT, VERIFY, read_run

LOOPBACK = "127.0.0.1"
_LOOK_SECONDS = 1.0
# A page that is not open any more is found out by writing to it.
_SIGN_OF_LIFE_SECONDS = 15.0
_SCRIPT = "<script>new EventSource('events?{version}').onmessage = () => location.reload()</script>"


class LiveReport:
    """A server of one page; a context, at whose end the port is free again."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Take a free port; nothing is answered before `serve`."""
        self._folders = tuple(folders)
        self._path = f"/{secrets.token_urlsafe(16)}/"
        self._is_open = True
        self._server = ThreadingHTTPServer((LOOPBACK, 0), _handler(self._answer))
        self._server.daemon_threads = True

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.port}{self._path}"

    def __enter__(self) -> LiveReport:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self._server.server_close()

    def serve(self) -> None:
        """Answer until `stop`, or until the process is interrupted."""
        self._server.serve_forever(poll_interval=0.2)

    def stop(self) -> None:
        """End `serve`, from another thread."""
        self._is_open = False
        self._server.shutdown()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path, _, seen = request.path.partition("?")
        if path == self._path:
            _send(request, self._page())
        elif path == f"{self._path}events":
            self._send_events(request, seen)
        else:
            request.send_error(404)

    def _page(self) -> bytes:
        version = self._version()
        try:
            text = as_page([read_run(folder) for folder in self._folders])
        except MeshwrightError as error:  # a file that is being written: the next change mends it
            text = f"<!DOCTYPE html><title>{error.code}</title><p>{escape(str(error))}</p></body>"
        return text.replace("</body>", f"{_SCRIPT.format(version=version)}</body>").encode()

    def _send_events(self, request: BaseHTTPRequestHandler, seen: str) -> None:
        """A line whenever the files are not those of `seen` any more, the version of the page that asks."""
        request.send_response(200)
        request.send_header("Content-Type", "text/event-stream")
        request.send_header("Cache-Control", "no-store")
        request.end_headers()
        written = time.monotonic()
        while self._is_open:
            now = self._version()
            if now != seen or time.monotonic() - written > _SIGN_OF_LIFE_SECONDS:
                try:
                    request.wfile.write(b": open\n\n" if now == seen else b"data: changed\n\n")
                    request.wfile.flush()
                except OSError:
                    return
                seen, written = now, time.monotonic()
            time.sleep(_LOOK_SECONDS)

    def _version(self) -> str:
        """Of the files' times and sizes."""
        names = (METRICS, PLAN, CONFIG, RESULT, VERIFY)
        stamps = [_stamp(folder / name) for folder in self._folders for name in names]
        return hashlib.sha256(" ".join(stamps).encode()).hexdigest()[:16]


def _stamp(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return "none"
    return f"{found.st_mtime_ns}:{found.st_size}"


def _send(request: BaseHTTPRequestHandler, page: bytes) -> None:
    request.send_response(200)
    request.send_header("Content-Type", "text/html; charset=utf-8")
    request.send_header("Content-Length", str(len(page)))
    request.send_header("Cache-Control", "no-store")
    request.end_headers()
    request.wfile.write(page)


def _handler(answer: Callable[[BaseHTTPRequestHandler], None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            """A terminal is no place for a line a request."""

    return Handler
