"""Shapes of models that are Python objects: sizes of a configuration, believed where the parameters agree."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch import nn

import meshwright
from meshwright.errors import ConfigError
from meshwright.launching import shapes
from meshwright.models.build import build_model
from meshwright.models.loss import language_model_loss
from meshwright.presets import find_model
from meshwright.presets.counts import num_parameters
from meshwright.training.config import load_config
from meshwright.training.shape import shape_of_model
from tests.training.hf_models import SIZES, save
from tests.verification.models import Tokens


class Small(nn.Module):
    """A decoder as people write them: sizes under short names."""

    def __init__(self, *, inner: int = 4, vocab: int = 300) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_layer=3, n_head=4, n_embd=64, block_size=32, vocab_size=vocab)
        self.positions, self.tokens = nn.Embedding(32, 64), nn.Embedding(vocab, 64)
        self.blocks = nn.ModuleList(Small.block(inner) for _ in range(3))

    @staticmethod
    def block(inner: int) -> nn.Module:
        matrices = (64, 192), (64, 64), (64, inner * 64), (inner * 64, 64)
        return nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in matrices), nn.LayerNorm(64))


@pytest.mark.parametrize("name", ["gpt-nano", "gpt2", "llama-3.2-1b"])
def test_our_models_have_their_presets_shape(name):
    preset = find_model(name)
    found = shape_of_model(lambda: build_model(preset.family, dataclasses.asdict(preset)))
    assert num_parameters(found) == num_parameters(preset)
    sizes = (
        "family",
        "num_layers",
        "dim",
        "num_heads",
        "num_kv_heads",
        "ffn_dim",
        "vocab_size",
        "max_seq_len",
    )
    assert [getattr(found, size) for size in sizes] == [getattr(preset, size) for size in sizes]
    assert found.tied_embedding == preset.tied_embedding


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_models_of_transformers_have_theirs(family):
    build, loss = meshwright.hf(family, **SIZES[family])
    found = meshwright.plan((build, loss), cluster="2xh100", global_batch=8, seq_len=16)
    shape = found.request.work.model
    assert (shape.num_layers, shape.dim, shape.num_heads, shape.vocab_size) == (2, 32, 4, 67)
    assert (shape.family, shape.num_kv_heads) == (("gpt", 4) if family == "gpt2" else ("llama", 2))
    assert found.source == f"hf:{family}"


def test_a_folder_of_weights_is_read_by_its_name_and_without_torch(tmp_path, monkeypatch):
    save("llama", tmp_path / "tiny", vocab_size=256)
    monkeypatch.setattr(shapes, "run_local", None)  # no process is needed for it
    named = meshwright.plan(f"hf:{tmp_path / 'tiny'}", cluster="2xh100", global_batch=8, seq_len=16)
    folder = meshwright.plan(tmp_path / "tiny", cluster="2xh100", global_batch=8, seq_len=16)
    made = meshwright.plan(
        meshwright.hf(str(tmp_path / "tiny"), init="pretrained"), cluster="2xh100", seq_len=16
    )
    assert named.request == folder.request
    shape = dataclasses.replace(folder.request.work.model, name="", source="")
    assert dataclasses.replace(made.request.work.model, name="", source="") == shape
    assert (named.source, made.source) == (f"hf:{tmp_path / 'tiny'}",) * 2


def test_a_model_with_sizes_under_other_names():
    found = shape_of_model(Small())
    assert (found.family, found.num_layers, found.ffn_dim, found.max_seq_len) == ("gpt", 3, 256, 32)
    assert found.tied_embedding
    assert meshwright.plan(Small, cluster="2xh100").request.work.model == found


def make():
    """What a run file names."""
    return Small(), language_model_loss, Tokens(300, 16)


def test_a_function_that_a_run_names():
    here = "py:tests.training.test_shape:make"
    config = load_config(None, [f"model.source={here}"]).config
    found = shapes.shape_of_run(config, here=True)
    assert (found.name, found.num_layers, found.dim) == (here, 3, 64)
    assert shapes.shape_of_run(load_config(None).config) is None  # a preset, which the planner reads


MINE = """
from torch import nn
from meshwright.models.gpt import GPT, GPTConfig
from meshwright.models.loss import language_model_loss
from tests.verification.models import Tokens

def make():
    sizes = GPTConfig(num_layers=2, dim=32, num_heads=4, ffn_dim=128, vocab_size=64, max_seq_len=16)
    return GPT(sizes), language_model_loss, Tokens(64, 16)

def other():
    return nn.Linear(3, 3), *make()[1:]
"""


@pytest.mark.parity
def test_a_function_is_planned_for_and_verified_by_its_plan_from_the_command_line(tmp_path):
    """Its shape is looked at in a process of its own."""
    (tmp_path / "mine.py").write_text(MINE)
    sections = {"model": 'source = "py:mine:other"', "data": "seq_len = 16", "plan": "processes = 2"}
    (tmp_path / "run.toml").write_text("".join(f"[{name}]\n{line}\n" for name, line in sections.items()))

    def run(*arguments):
        command = [sys.executable, "-m", "meshwright", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)

    done = run(
        "plan", "py:mine:make", "--cluster", "2xh100", "--seq", "16", "--batch", "8", "--plan", "zero=1"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("model    py:mine:make ")
    done = run("plan", "run.toml")
    assert (done.returncode, "E269 Linear has no shape" in done.stderr) == (2, True)
    done = run("verify", "plan.lock.json", "--steps", "1", "--no-resume")
    assert done.returncode == 0, done.stderr
    assert "zero1x2" in done.stdout


def test_a_shape_that_the_parameters_deny_is_not_believed():
    with pytest.raises(
        ConfigError, match=r"E269 Small has 2\d\d,\d{3} parameters, and a \w+ model of the sizes"
    ):
        shape_of_model(Small(inner=8))
    with pytest.raises(ConfigError, match=r"E269 Linear has no shape .* plan=\"auto\""):
        shape_of_model(nn.Linear(3, 3))
    build, _ = meshwright.hf("vit", **SIZES["vit"])
    with pytest.raises(ConfigError, match="E269 ViTForImageClassification has no shape"):
        shape_of_model(build)
    with pytest.raises(ConfigError, match="E111 int is no model to plan for"):
        meshwright.plan(lambda: 3, cluster="2xh100")
