import json
import subprocess
import sys

import pytest

from meshwright.errors import ConfigError
from meshwright.planner.asking import ask
from meshwright.planner.plans import make_plans
from meshwright.planner.text import warnings_of
from meshwright.presets.hf_config import read_hf_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}


def run(*arguments, cwd):
    command = [sys.executable, "-m", "meshwright", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_a_plan_of_a_config_json_and_questions_about_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    done = run(
        "plan", "config.json", "--cluster", "8xh100", "--seq", "4096", "--batch", "64", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert {"plans", "searched", "rejected", "seconds", "gap"} <= set(value)
    assert value["plans"][0]["trainable"]
    text = run("explain", "1 vs 2", cwd=tmp_path).stdout
    assert "2 against 1: " in text


def test_bad_input_has_its_exit_code(tmp_path):
    for arguments, code, text in (
        (("plan", "gpt3-175b", "--cluster", "8xl4"), 3, "E301 does not fit"),
        (("plan", "gpt3-175", "--cluster", "8xl4"), 2, "Did you mean 'gpt3-175b'"),
        (("plan", "gpt3-175b", "--cluster", "8xh101"), 2, "Did you mean"),
    ):
        done = run(*arguments, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert text in done.stderr


def test_the_command_imports_no_torch():
    code = "import meshwright.cli.plan, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_config_json_without_a_shape(tmp_path):
    path = tmp_path / "config.json"
    for change, text in (
        ({"model_type": "resnet"}, "model_type='resnet'"),
        ({"head_dim": 128}, "heads of width 128"),
        ({"hidden_size": "wide"}, "none of hidden_size"),
    ):
        path.write_text(json.dumps({**LLAMA, **change}))
        with pytest.raises(ConfigError, match="E287") as caught:
            read_hf_config(path)
        assert text in caught.value.message


def test_a_host_that_was_not_measured_is_said():
    run = {"model": {"source": "preset:gpt-nano"}}
    (text,) = warnings_of(make_plans(ask(run, {"cluster": "2xcpu"})))
    assert text.startswith("W285 this host was not measured")
