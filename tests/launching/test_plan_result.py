"""`meshwright.plan`: the planner from Python, with the same answers as on the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import meshwright
from meshwright.cli.plan import plan as command
from meshwright.errors import ConfigError, DoesNotFitError, PlanError
from meshwright.planner.compare import answer
from meshwright.planner.lock import read_lock
from meshwright.planner.plans import describe
from meshwright.training.config import RunConfig

JOB = {"cluster": "64xh100", "global_batch": 512, "seq_len": 8192}
RUN = """
[model]
source = "gpt-nano"
[data]
seq_len = 64
[train]
global_batch = 8
[plan]
cluster = "4xh100"
zero = 1
"""
NO_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it raises
import meshwright
p = meshwright.plan("llama-3.1-70b", cluster="64xh100", global_batch=512, seq_len=8192, plan="tp=8")
print(p)
p.pareto()._repr_svg_(), p.gantt(2)._repr_svg_(), p._repr_html_(), p.rejected("pp=4"), p.compare(1, 2)
p.save("plan.lock.json")
"""


@pytest.fixture(scope="module")
def found():
    return meshwright.plan("llama-3.1-70b", **JOB)


def test_a_plan_needs_no_torch(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "> 1 " in done.stdout.replace(">1", "> 1")
    assert all(entry["keys"]["tp"] == 8 for entry in read_lock(tmp_path / "plan.lock.json")["plans"])


def test_the_best_plan_has_its_figures(found):
    best = found.best
    entry = found.to_json()["plans"][0]
    assert best.mfu == entry["mfu"]
    assert best.step_seconds == entry["step_seconds"]
    assert best.keys == entry["keys"]
    assert best.memory == entry["memory_bytes"]
    assert sum(size for name, size in best.memory.items() if name != "peak") == best.memory["peak"]
    cost = best.cost("100B tokens", usd_per_gpu_hour=2.3)
    assert cost.device_hours == pytest.approx(100e9 / (512 * 8192) * best.step_seconds / 3600 * 64)
    assert cost.dollars == pytest.approx(cost.device_hours * 2.3)
    assert best.cost(100e9).days == cost.days
    with pytest.raises(ConfigError, match="E102 tokens='20G'"):
        best.cost("20G")
    with pytest.raises(ConfigError, match=r"E285 usd_per_gpu_hour=2\.3 needs the length"):
        found.table(usd_per_gpu_hour=2.3)
    assert best.obstacle == ""
    assert repr(best).startswith(f"plan 1: {describe(best.layout)}: ")


def test_questions_have_the_answers_of_the_command_line(found, tmp_path):
    lock = read_lock(found.save(tmp_path / "plan.lock.json"))
    assert found.rejected("tp=16").lines == answer("why not tp=16", lock).lines
    assert found.compare(1, 3).lines == answer("1 vs 3", lock).lines
    assert found.rejected("tp=8,pp=8").other is not None
    assert "not possible: plan tp=7" in str(found.rejected("tp=7"))
    assert repr(found.compare(1, 3)).splitlines()[-1].startswith("3 against 1: ")
    for ask in (lambda: found.compare(1, 9), lambda: found.gantt(9)):
        with pytest.raises(ConfigError, match="E288 plan 9: there are plans 1 to 5"):
            ask()


def test_the_command_line_prints_and_writes_the_same(found, tmp_path, capsys):
    """But for the seconds that it took."""
    options = {"seq": 8192, "batch": "512 sequences", "price": 2.3, "out": tmp_path / "one.json"}
    command("llama-3.1-70b", "64xh100", tokens="100B", **options)
    *printed, wrote = capsys.readouterr().out.splitlines()
    table = found.table("100B tokens", usd_per_gpu_hour=2.3).splitlines()
    assert [line for line in printed if "searched" not in line] == [
        line for line in table if "searched" not in line
    ]
    assert f"{found}".splitlines()[1] == printed[1]
    assert wrote.startswith("wrote ")
    found.save(tmp_path / "two.json")
    assert (tmp_path / "one.json").read_text() == (tmp_path / "two.json").read_text()
    assert json.loads((tmp_path / "two.json").read_text()) == json.loads(json.dumps(found.lock()))


def test_run_files_and_configurations_say_what_is_fixed(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    of_file = meshwright.plan(tmp_path / "run.toml")
    values = {"model": {"source": "gpt-nano"}, "data": {"seq_len": 64}, "train": {"global_batch": 8}}
    of_config = meshwright.plan(RunConfig.model_validate(values), cluster="4xh100", plan="zero=1")
    assert of_file.request == of_config.request
    assert dict(of_file.request.fixed) == {"zero": 1}
    assert (
        meshwright.plan(str(tmp_path / "run.toml"), cluster="2xa100", seq_len=32).request.work.seq_len == 32
    )
    assert of_file.source == str(tmp_path / "run.toml")
    assert of_config.source == "preset:gpt-nano"


def test_wrong_questions_have_the_errors_of_the_command_line():
    with pytest.raises(ConfigError, match=r"E282 .*cluster='64xh100'"):
        meshwright.plan("gpt-nano")
    with pytest.raises(ConfigError, match=r"E104 .*Did you mean 'gpt3-175b'"):
        meshwright.plan("gpt3-175", cluster="8xh100")
    with pytest.raises(PlanError, match="E286"):
        meshwright.plan("gpt3-175b", cluster="8xh100", plan="tp=3")
    with pytest.raises(DoesNotFitError, match="E301"):
        meshwright.plan("gpt3-175b", cluster="8xl4")
    with pytest.raises(ConfigError, match="E285"):
        meshwright.plan("gpt3-175b", cluster="512xh100", headroom=1.5)
    roomy = meshwright.plan("gpt-nano", cluster="2xh100", headroom="50%", count=2)
    assert roomy.request.headroom == 0.5
    assert len(roomy.plans) == 2
