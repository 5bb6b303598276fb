"""`meshwright draw --graph`: tables, pictures and files of models."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import MeshwrightError
from meshwright.graph.json_file import from_json

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def call(*arguments):
    return CliRunner().invoke(app, ["draw", "--graph", *arguments])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A preset as JSON."""
    path = tmp_path_factory.mktemp("graph") / "gpt.json"
    assert call("gpt-nano", "--out", str(path)).stdout == f"wrote {path}\n"
    return path


def test_a_file_draws_the_table_at_any_size(saved):
    table = call(str(saved), "--batch", "4", "--sequence", "100").stdout
    assert "842,496 parameters; batch 4, sequence 100: " in table
    assert "blocks.0" in table
    assert "x 4" in table
    assert "token_embedding.weight = head.weight" in table
    assert from_json(saved.read_text()).free == ("batch", "sequence")


def test_json_tells_costs_and_formulas(saved):
    printed = json.loads(call(str(saved), "--batch", "1", "--sequence", "100", "--json").stdout)
    assert printed["flops"] == 100 * (4 * (24 * 128**2 + 4 * 128 * 100) + 2 * 128 * 256)
    assert printed["flops_formula"] == "2048*b*s^2 + 1638400*b*s"
    assert printed["backward_flops"] > 2 * printed["flops"]
    assert printed["ties"] == [["token_embedding.weight", "head.weight"]]


def test_a_picture_has_a_box_a_block(saved, tmp_path):
    path = tmp_path / "gpt.svg"
    call(str(saved), "--out", str(path))
    tree = ElementTree.parse(path)
    texts = [node.text or "" for node in tree.iter(SVG + "text")]
    assert "4 x blocks.0" in texts
    tips = [node.text or "" for node in tree.iter(SVG + "title")]
    assert any(tip.startswith("4 x ") and "198,272 parameters" in tip for tip in tips)


def test_models_of_other_sources_are_read(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))\n"
        "    loss = lambda m, batch: (m(batch[0]).square().sum(), batch[1].numel())\n"
        "    return model, loss, [(torch.ones(6), i) for i in range(4)]\n"
    )
    monkeypatch.chdir(tmp_path)
    printed = json.loads(call("py:mine:build", "--batch", "5", "--json").stdout)
    assert printed["flops_formula"] == "144*b"
    assert (printed["batch"], printed["free"]) == (5, ["batch"])
    vit = {"model_type": "vit", "image_size": 32, "patch_size": 16, "hidden_size": 16, "num_hidden_layers": 2}
    vit |= {"num_attention_heads": 2, "intermediate_size": 32, "architectures": ["ViTForImageClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(vit))
    printed = json.loads(call(f"hf:{tmp_path}", "--json").stdout)
    assert printed["graph"] == "ViTForImageClassification"
    assert printed["free"] == ["batch"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["mnst"], "E104", "mnst"),
        (["gpt-nano", "--batch", "0"], "E109", "each is at least 1"),
        (["lost.json"], "E100", "no such file"),
        (["lost.onnx"], "E100", "no such file"),
    ],
)
def test_refused(arguments, code, text):
    error = call(*arguments).exception
    assert isinstance(error, MeshwrightError)
    assert error.code == code
    assert text in error.message
