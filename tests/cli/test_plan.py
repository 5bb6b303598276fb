import json
import re
import subprocess
import sys

import pytest

from meshwright.cli.plan import pays_text, plan
from meshwright.cli.simulate import simulate
from meshwright.errors import ConfigError
from meshwright.planner.asking import ask
from meshwright.planner.compare import layout_from
from meshwright.planner.plans import describe, make_plans
from meshwright.planner.scaling import scale
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
    text = run("explain", "plan", cwd=tmp_path).stdout
    assert "64 sequences of 4,096 tokens a step, on 8 x h100" in text
    first = value["plans"][0]
    assert f"1  {describe(layout_from(first))}: {first['step_seconds']:.3g} s" in text
    assert first["why"] in text


def test_bad_input_has_its_exit_code(tmp_path):
    for arguments, code, text in (
        (("plan", "gpt3-175b", "--cluster", "8xl4"), 3, "E301 does not fit"),
        (("plan", "gpt3-175", "--cluster", "8xl4"), 2, "Did you mean 'gpt3-175b'"),
        (("plan", "gpt3-175b", "--cluster", "8xh101"), 2, "Did you mean"),
    ):
        done = run(*arguments, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert text in done.stderr


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("512 tokens", "--batch='512 tokens'"),
        ("0", "--batch='0'"),
        ("1M sequences", "--batch='1M sequences'"),
    ],
)
def test_a_batch_is_a_number_of_sequences(value, text):
    model = {"model": {"source": "preset:gpt2-xl"}}
    with pytest.raises(ConfigError, match="E283") as caught:
        ask(model, {"cluster": "8xh100"}, batch=value)
    assert text in caught.value.message
    assert ask(model, {"cluster": "8xh100"}, batch="512 sequences").work.global_batch == 512


def test_what_is_printed_adds_up_and_says_what_it_is(tmp_path, capsys):
    out = tmp_path / "plan.json"
    plan("gpt-nano", "12xh100", batch="24", tokens="1B", price=2.0, out=out)
    text = capsys.readouterr().out
    (searched,) = (line for line in text.splitlines() if line.startswith("searched"))
    numbers = [
        int(part.replace(",", "")) for part in re.findall(r"([\d,]+) (?:priced|refused|left out)", searched)
    ]
    assert int(searched.split()[1].replace(",", "")) == sum(numbers)
    assert "842 K params" in text
    assert "2 nodes x 8, the last with 4" in text
    assert "* " not in text or "train does not run it today" in text
    found = json.loads(out.read_text())
    assert found["source"] == "gpt-nano"


def test_a_price_needs_the_length_of_the_run(tmp_path):
    with pytest.raises(ConfigError, match=r"E285 --price=2 needs .* --tokens"):
        plan("gpt-nano", "8xh100", price=2.0, out=tmp_path / "plan.json")


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    for verb, option in (
        (plan, {"out": tmp_path}),
        (simulate, {"plan": "pp=2", "svg": tmp_path / "no" / "x.svg"}),
    ):
        with pytest.raises(ConfigError, match=r"E297 cannot write '.*Name a place that can be written"):
            verb("gpt-nano", "8xh100", batch="16", **option)


@pytest.mark.parametrize(
    ("pays", "text"), [(None, "nothing fits"), (2, "up to 2: beyond"), (4, "up to 4, the end of this row")]
)
def test_scaling_ends_with_what_it_found(pays, text):
    request = ask({"model": {"source": "preset:gpt-nano"}}, {"cluster": "4xh100"}, batch="64")
    assert text in pays_text(scale(request, (1, 2, 4)), pays)


def test_the_command_imports_no_torch():
    code = "import meshwright.cli.plan, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_config_json_without_a_shape(tmp_path):
    path = tmp_path / "config.json"
    for change, text in (
        ({"model_type": "resnet"}, "model_type='resnet'"),
        ({"head_dim": 128}, "heads of width 128"),
        ({"hidden_size": "wide"}, "none of hidden_size"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads='8' is no whole number"),
    ):
        path.write_text(json.dumps({**LLAMA, **change}))
        with pytest.raises(ConfigError, match="E287") as caught:
            read_hf_config(path)
        assert text in caught.value.message


def test_a_host_that_was_not_measured_is_said():
    run = {"model": {"source": "preset:gpt-nano"}}
    (text,) = warnings_of(make_plans(ask(run, {"cluster": "2xcpu"})))
    assert text.startswith("W285 this host was not measured")
