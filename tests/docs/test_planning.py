"""The Python of docs/planning.md runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.models.loss import language_model_loss
from tests.verification.models import Tokens

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "planning.md"


def run(name: str) -> dict[str, object]:
    """All blocks, one after the other, in a module of this name."""
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 2
    values: dict[str, object] = {"__name__": name, "loss": language_model_loss, "dataset": Tokens(64, 32)}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), values)
    return values


def test_what_the_page_asks_is_answered(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    values = run("page")
    assert capsys.readouterr().out.startswith("model    llama-3.1-70b ")
    assert (tmp_path / "plan.lock.json").is_file()
    assert values["p"].best.keys["zero"] == 1
    assert len(values["fixed"].plans) <= 3


@pytest.mark.parity
def test_what_the_page_trains_and_verifies_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run("__main__")
    assert (tmp_path / "runs" / "llama" / "result.json").is_file()
