"""Chromium inside Qt, as a process: opens pages, asks each a question, says what it logged and requested.

Reads {"ask": JavaScript, "views": [...]} from standard input, prints a list of answers; `browsers.py` starts it, with
an environment in which it needs neither a display nor a sandbox.
"""

from __future__ import annotations

import json
import os
import sys

from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineCore import (
    QWebEnginePage,
    QWebEngineProfile,
    QWebEngineSettings,
    QWebEngineUrlRequestInterceptor,
)
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

HEIGHT = 900
# Until what is shown in a taller window is painted.
PAINTED_MILLISECONDS = 1500


class Requests(QWebEngineUrlRequestInterceptor):
    """Writes down what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def interceptRequest(self, info) -> None:
        self.urls.append(info.requestUrl().toString())


class Page(QWebEnginePage):
    """Writes down what the console is told."""

    def __init__(self, profile: QWebEngineProfile) -> None:
        super().__init__(profile)
        self.said: list[str] = []

    def javaScriptConsoleMessage(self, level, message, line, source) -> None:
        self.said.append(f"{message} ({source}:{line})")


class Tour:
    """The views, one after the other, each with a profile of its own."""

    def __init__(self, application: QApplication, order: dict) -> None:
        self.application, self.ask, self.views = application, order["ask"], list(order["views"])
        self.answers: list[dict] = []
        self.kept: list[tuple] = []  # Qt keeps no page alive

    def following(self) -> None:
        if not self.views:
            self.application.quit()
            return
        view = self.views.pop(0)
        profile, requests, widget = QWebEngineProfile(), Requests(), QWebEngineView()
        profile.setUrlRequestInterceptor(requests)
        page = Page(profile)
        # Else a file's requests would be refused before they are seen.
        page.settings().setAttribute(QWebEngineSettings.WebAttribute.LocalContentCanAccessRemoteUrls, True)
        self.kept.append((profile, requests, page, widget))
        widget.setPage(page)
        widget.resize(view["width"], HEIGHT)
        page.loadFinished.connect(
            lambda _: page.runJavaScript(self.ask, lambda text: self.answered(view, text))
        )
        widget.show()
        page.load(QUrl.fromLocalFile(view["page"]))

    def answered(self, view: dict, text: str) -> None:
        _, requests, page, widget = self.kept[-1]
        own = QUrl.fromLocalFile(view["page"]).toString()
        others = [url for url in requests.urls if url != own]
        self.answers.append({"answer": text, "said": page.said, "requests": others})
        if not view["picture"]:
            widget.hide()
            QTimer.singleShot(0, self.following)
            return
        widget.resize(view["width"], round(json.loads(text)["height"]))
        QTimer.singleShot(PAINTED_MILLISECONDS, lambda: self.drawn(view["picture"]))

    def drawn(self, picture: str) -> None:
        widget = self.kept[-1][3]
        widget.grab().save(picture)
        widget.hide()
        self.following()


def main() -> None:
    application = QApplication(sys.argv[:1])
    tour = Tour(application, json.load(sys.stdin))
    QTimer.singleShot(0, tour.following)
    application.exec()
    print(json.dumps(tour.answers), flush=True)
    os._exit(0)  # Qt's own end takes seconds, and profiles must go after pages


if __name__ == "__main__":
    main()
