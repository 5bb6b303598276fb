"""Run folders as training writes them, made without training, and a page read by an HTML parser."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from meshwright.layout.plan import TrainPlan
from meshwright.layout.policy import find_policy
from meshwright.mesh import MeshSpec
from meshwright.reporting.reading import fingerprint

CONFIG = """[model]
source = "preset:gpt-nano"  # run.toml:2

[train]
stop_at = "6 # not 7"  # command line
seed = 1  # default
global_batch = "32 sequences"  # run.toml:7

[data]
seq_len = 128  # run.toml:9
"""
RESULT: dict[str, Any] = {
    "step_seconds_median": 0.5,
    "tokens_per_second": 2048.0,
    "mfu": 0.4,
    "hfu": 0.5,
    "mfu_peak": "h100 bf16",
    "steps": 6,
    "final_loss": 3.0,
    "eval_loss": 3.5,
    "world_size": 4,
    "interrupted": False,
    "peak_memory_bytes": [3 << 20, 4 << 20, 5 << 20, 6 << 20],
    "memory_bytes": {
        "predicted": {"weights": 4 << 20, "optimizer": 8 << 20, "communication": None, "host": 0},
        "measured": {"weights": 4 << 20, "optimizer": 9 << 20, "communication": 512, "host": 0},
        "peak_at": None,
    },
    "prediction": {
        "step_seconds": 0.4,
        "step_error": -0.2,
        "step_parts": {"compute": 0.3, "recompute": 0.1, "bubble": 0.1, "tensor": 0.0},
        "memory_bytes": {"weights": 3 << 20, "peak": 5 << 20},
        "memory_error": -1 / 6,
        "runs_before": 2,
    },
    "communication": [
        {"group": "dp", "operation": "all_gather", "calls": 7, "bytes": 7 << 20},
        {"group": "pp", "operation": "send", "calls": 48, "bytes": 3 << 20},
    ],
    "environment": {"meshwright": "0.1.0", "torch": "2.13.0"},
}
CHECKS = [
    {"name": "loss", "ok": True, "compared": 3, "wrong": 0, "worst_relative": 0.0, "first_wrong": None},
    {"name": "ties", "ok": True, "compared": 0, "wrong": 0, "worst_relative": 0.0, "first_wrong": None},
    {
        "name": "gradients",
        "ok": False,
        "compared": 9,
        "wrong": 2,
        "worst_relative": 0.5,
        "first_wrong": "<w>",
    },
]
VERIFY = {"ok": False, "candidate": "pp2", "reference": "one process", "model": "gpt", "checks": CHECKS}


def plan_of(*, pp: int = 2, schedule: str = "1f1b", microbatches: int = 4) -> TrainPlan:
    mesh = MeshSpec.of(pp=pp, dp_replicate=1, dp_shard=2, cp=1, tp=1)
    batch = 8 * microbatches
    return TrainPlan(mesh, find_policy("zero1"), batch, 4, microbatches, precision="bf16", schedule=schedule)


def steps(count: int = 6) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "loss": 6.0 - step / 2,
            "grad_norm": None if step == 2 else 1.0 / step,
            "lr": 1e-3,
            "tokens": 1024 * step,
            "seconds": 0.5,
            "tokens_per_second": 2048.0,
            "mfu": 0.3 + step / 100,
            "hfu": 0.5,
            "eval_loss": 3.5 if step == count else None,
        }
        for step in range(1, count + 1)
    ]


def make_folder(path: Path, *, plan: TrainPlan | None = None, num_steps: int = 6) -> Path:
    """A run that has come to its end, with everything that a folder can hold."""
    path.mkdir()
    (path / "plan.lock.json").write_text((plan or plan_of()).to_json())
    (path / "resolved.toml").write_text(CONFIG)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps(num_steps)))
    (path / "result.json").write_text(json.dumps(RESULT))
    (path / "verify.json").write_text(json.dumps({**VERIFY, "fingerprint": fingerprint(path)}))
    return path


@dataclass
class Section:
    """What stands under one anchor.

    Attributes:
        marks: bars, boxes and circles.
        points: of all lines.
        widths: of bars and boxes, in percent.
        rows: cells of the data table, without its head.
        text: all words.
    """

    marks: int = 0
    points: int = 0
    widths: list[float] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    text: str = ""


class Page(HTMLParser):
    """Sections by anchor, every attribute that a browser could load from, and unclosed elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.sections: dict[str, Section] = {}
        self.sources: list[str] = []
        self.tags: set[str] = set()
        self.anchors: list[str] = []
        self.open: list[str] = []
        self._now = Section()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        if tag not in ("meta", "link"):
            self.open.append(tag)
        if tag == "section":
            self._now = self.sections[found["id"]] = Section()
        self.anchors += [found["id"]] if "id" in found else []
        self.sources += [found[name] for name in ("src", "href", "action", "data") if name in found]
        if "mark" in found.get("class", "").split():
            if tag == "polyline":
                self._now.points += len(found["points"].split())
            else:
                self._now.marks += 1
            if tag == "rect":
                self._now.widths.append(float(found["width"].rstrip("%")))
        if tag == "tr":
            self._now.rows.append([])
        if tag == "td":
            self._now.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"
        if tag == "table":
            self._now.rows = [row for row in self._now.rows if row]

    def handle_data(self, data: str) -> None:
        self._now.text += data
        if self.open and self.open[-1] == "td":
            self._now.rows[-1][-1] += data
