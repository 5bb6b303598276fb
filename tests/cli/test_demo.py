import json

import pytest
from typer.testing import CliRunner

from meshwright.cli.demo import read_losses, sparkline
from meshwright.cli.main import app
from meshwright.verification.result import Check, VerifyResult, Wrong


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """A fake run whose metrics fall from 5 to 2; the list of configurations."""
    calls = []
    losses = [5.0, 4.0, 3.0, 2.0]

    def launch_config(resolved, *, json_output, plan):
        calls.append(resolved)
        lines = (json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, start=1))
        (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return {
            "run_dir": str(tmp_path),
            "first_loss": losses[0],
            "final_loss": losses[-1],
            "eval_loss": 2.25,
            "tokens_per_second": 12345.6,
            "step_seconds_median": 0.05,
            "peak_memory_bytes": [2**27, 2**28],
            "prediction": {"step_error": -0.1, "memory_error": 0.02},
        }

    def verify_loaded(load, options):
        config = load(["plan.zero=2"]).config
        assert (config.plan.zero, config.plan.mode) == (2, "given")
        return compared(None)

    monkeypatch.setattr("meshwright.launching.launch_config", launch_config, raising=False)
    # The machine is not measured here.
    monkeypatch.setattr("meshwright.launching.planned.located", lambda request, cache, *, measures: request)
    monkeypatch.setattr("meshwright.launching.verify.verify_loaded", verify_loaded)
    return calls


def compared(wrong):
    checks = (
        Check("loss", True, 3, worst_relative=2e-16),
        Check("gradients", wrong is None, 21, num_wrong=0 if wrong is None else 1, first_wrong=wrong),
    )
    return VerifyResult(checks, "one process", "zero1x2", "gpt-nano", 3.0, {})


def test_demo_trains_a_fixed_run_on_two_processes(launched, tmp_path):
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 0, result.exception
    (resolved,) = launched
    config = resolved.config
    assert (config.plan.processes, config.plan.zero, config.train.deterministic) == (2, 1, True)
    assert config.train.stop_at.unit == "steps"
    assert resolved.origins["plan.zero"] == "demo"
    lines = result.stdout.splitlines()
    assert lines[0].startswith(" 1/5 machine   ")
    assert lines[0].endswith("→ 2 CPU processes")
    assert "loss      5.0000 █▆▃▁ 2.0000   held-out 2.2500 nats a byte" in result.stdout
    assert lines[1].startswith(" 2/5 plan      zero1x2 of this host as it was measured: ")
    assert "compared  step -10%, peak +2%: predicted against measured" in result.stdout
    assert "12,346 tokens/s   0.050 s a step   peak 256 MiB a rank" in result.stdout
    assert " 4/5 verify    2 processes == 1 process   loss diff 2.0e-16   21/21 gradients ✓" in lines
    assert f" 5/5 report    {tmp_path / 'report.html'}" in lines
    assert "verified equal to one device in 2 checks" in (tmp_path / "report.html").read_text()
    assert f"kept in {tmp_path}" in result.stdout


def test_a_demo_that_does_not_verify_says_so(launched, monkeypatch):
    wrong = Wrong("gradients", "head.weight", 1, ranks=(0,), holders=(0, 1), ratio=2.0)
    monkeypatch.setattr("meshwright.launching.verify.verify_loaded", lambda load, options: compared(wrong))
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 4
    assert "first wrong head.weight: exactly 2.0000 x reference (step 1 on rank 0)" in result.stdout


def test_demo_json(launched):
    result = CliRunner().invoke(app, ["demo", "--json"])
    value = json.loads(result.stdout)
    assert value["train"]["eval_loss"] == 2.25
    assert value["plan"]["step_seconds"] > 0
    assert value["verify"]["ok"]
    assert value["report"].endswith("report.html")


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, 7.0, 3.0]) == "▁█▄"
    assert sparkline(list(map(float, range(100))), width=4) == "▁▃▆█"


def test_losses_are_read_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2}\n')
    assert read_losses(path) == [2.5, 2.0]
