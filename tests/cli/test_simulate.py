"""`meshwright simulate`: its text, its JSON, its exit codes."""

import csv
import gzip
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import ConfigError

RUNNER = CliRunner()
GPT3 = ["simulate", "gpt3-175b", "--cluster", "1024xa100", "--batch", "1536 sequences"]
PLAN = ["--plan", "tp=8,pp=8,zero=1,recompute=full"]


def run(*arguments):
    done = RUNNER.invoke(app, [*arguments])
    return done.exit_code, done.stdout, done.exception


def test_a_plan_is_priced_with_its_parts():
    code, text, _ = run(*GPT3, *PLAN)
    assert code == 0
    assert "pp 8 · dp 16 · cp 1 · tp 8 · zero 1 · 1f1b · micro 1 x 96 · recompute full" in text
    assert "compute" in text
    assert "optimizer" in text


def test_json_is_one_entry_of_plans():
    code, text, _ = run(*GPT3, *PLAN, "--json")
    found = json.loads(text)
    assert code == 0
    assert found["mesh"] == {"pp": 8, "dp": 16, "cp": 1, "tp": 8}
    assert found["fits"]
    assert found["warnings"] == []
    parts = sum(value for key, value in found["step_parts"].items() if key != "recompute")
    assert parts == pytest.approx(found["step_seconds"])
    memory = found["memory_bytes"]
    assert memory["peak"] == pytest.approx(sum(value for key, value in memory.items() if key != "peak"))


def test_a_plan_that_does_not_fit_ends_with_3():
    code, text, _ = run(*GPT3, "--plan", "tp=1", "--json")
    assert code == 3
    assert not json.loads(text)["fits"]
    assert json.loads(text)["warnings"][0].startswith("W280 does not fit: ")


def test_what_is_doubtful_is_said():
    code, text, _ = run("simulate", "gpt2-124m", "--cluster", "8xl4", "--batch", "20", "--json")
    assert code == 0
    first, second = json.loads(text)["warnings"]
    assert first.startswith("W281 l4 has no constants of its own")
    assert second.startswith("W282 a batch of 20 is priced as 24: dp x micro_batch = 8")


def test_a_run_file_is_priced(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nsource = "preset:llama-3.1-8b"\n[data]\nseq_len = 4096\n[train]\nglobal_batch = 64\n'
        '[plan]\nzero = 3\nmicro_batch = 2\nprecision = "bf16"\ncluster = "8xh100"\n'
    )
    code, text, _ = run("simulate", str(path), "--json")
    assert code == 0
    assert json.loads(text)["num_microbatches"] == 4


def test_the_shipped_table_is_priced_and_written(tmp_path):
    out = tmp_path / "predictions.csv"
    code, text, _ = run("simulate", "--published", "shipped", "--out", str(out), "--json")
    assert code == 0
    found = json.loads(text)
    # Each row has a step time, or ran out of memory, or has a peak alone.
    last, fits = found["sources"][-1], found["fits"]
    assert found["rows"] - last["num_times"] - fits["failed"] == 13
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["predicted_iteration_time_s"]) > 0
    assert {"predicted_peak_mem_gib", "predicted_mfu", "skipped_reason"} <= set(rows[0])
    again, listing, _ = run("simulate", "--published", str(out))
    assert again == 0
    assert "skipped 0 of" in listing


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["simulate", "gpt3-175b"], "E282", "there is no --cluster, e.g. --cluster 64xh100"),
        (["simulate", "gpt3-175b", "--cluster", "8xh100", "--plan", "dp=3"], "E280", "dp=3"),
        (
            ["simulate", "gpt3-175b", "--cluster", "8xh100", "--plan", "tp=3"],
            "E280",
            "tp=3 x pp=1 x cp=1 = 3 does not divide the 8 devices",
        ),
        (["simulate", "mlp-digits", "--cluster", "8xh100"], "E283", "only dense transformers are priced"),
        ([*GPT3, "--plan", "precision=fp8"], "E283", "has no fp8"),
        ([*GPT3[:4], "--batch", "many"], "E283", "--batch='many': write a whole number"),
        (["simulate", "mixtral-8x7b", "--cluster", "8xh100"], "E283", "a model with experts"),
        ([*GPT3, "--plan", "tp=8,zero=1,hsdp=3"], "E281", "hsdp=3 does not divide dp="),
        ([*GPT3, "--plan", "tp=8,pp=8,schedule=zb-h1,recompute=full"], "E281", "keeps what gradients"),
        (["simulate", "--published", "none.csv"], "E284", "cannot be read"),
    ],
)
def test_mistakes_have_a_code_and_a_way_out(arguments, code, message):
    _, _, error = run(*arguments)
    assert isinstance(error, ConfigError)
    assert error.code == code
    assert message in error.message


def test_a_run_file_and_a_config_json_are_priced_as_training_runs_them(tmp_path):
    (tmp_path / "run.toml").write_text(
        '[model]\nsource = "preset:gpt2-xl"\n[train]\nglobal_batch = 64\n[plan]\ncluster = "8xh100"\n'
    )
    code, text, _ = run("simulate", str(tmp_path / "run.toml"))
    assert code == 0
    assert "1024 tokens x 64 sequences" in text
    assert "micro 8 x 1" in text
    shape = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "vocab_size": 1000}))
    for place in (tmp_path, tmp_path / "config.json"):
        code, text, _ = run("simulate", str(place), "--cluster", "8xh100")
        assert code == 0
        assert "2048 tokens x 8 sequences" in text


def test_a_table_of_other_columns_is_refused(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("gpus,layers\n8,12\n")
    _, _, error = run("simulate", "--published", str(path))
    assert isinstance(error, ConfigError)
    assert error.code == "E284"
    assert "lacks hardware, hidden, seq_len, global_batch" in error.message


def test_no_torch_is_imported():
    code = (
        "import sys; sys.argv = ['meshwright', *sys.argv[1:]]\n"
        "from meshwright.cli.main import app\napp(standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *GPT3, *PLAN], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_pipeline_is_drawn_and_traced(tmp_path):
    svg, trace = tmp_path / "pipeline.svg", tmp_path / "step.json.gz"
    job = ("simulate", "gpt3-175b", "--cluster", "128xa100", "--batch", "16")
    code, text, _ = run(*job, "--plan", "tp=8,pp=16", "--svg", str(svg), "--trace", str(trace), "--json")
    assert code == 0
    found = json.loads(text)
    parts = found["step_parts"]
    assert found["pipeline_seconds"] > parts["compute"]
    assert 0 < found["pipeline_bubble"] < 1
    assert svg.read_text().count("<rect") > 16 * 16 * 2
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {event["pid"] for event in events} == set(range(16))
    _, listing, _ = run(*job, "--plan", "tp=8,pp=16", "--svg", str(svg))
    assert f"of it waiting · wrote {svg}" in listing
    _, _, error = run(*job, "--plan", "tp=8", "--svg", str(svg))
    assert error.code == "E283"
    assert "plan.pp=1 has no pipeline to draw; take pp=2 or more" in error.message
