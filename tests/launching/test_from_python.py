"""`meshwright.train` of Python objects: a model, its loss and its data become a run."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest
from torch import nn

import meshwright
from meshwright.errors import ConfigError, DoesNotFitError, PlanError
from meshwright.launching import deciding, from_python, jobs
from meshwright.launching.from_python import RunResult
from meshwright.models.build import build_model
from meshwright.models.loss import language_model_loss
from meshwright.presets import find_model
from meshwright.training.config import RunConfig, load_config
from meshwright.training.measured import Measured
from tests.pipeline.models import Images, UNet, pixel_loss
from tests.reporting.folders import make_folder
from tests.training.test_deciding import make_costs
from tests.verification.models import Rows, Tokens, loss_of_labels


@pytest.fixture
def launched(monkeypatch, tmp_path) -> list:
    """(configuration, functions or None) of each run that would have been started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    found: list = []

    def train(target, *, processes, run_dir):
        config, call, _, resume = target.args
        found.append((config, None if call is None else pickle.loads(call), processes, resume))
        return [{"steps": 1}]

    def measure(target, *, processes, run_dir):
        assert target.args[1] is not None, "functions travel to the ranks that measure, too"
        return [Measured(make_costs(), "", None)] * processes

    monkeypatch.setattr(jobs, "run_local", train)
    monkeypatch.setattr(deciding, "run_local", measure)
    return found


def test_a_model_with_its_loss_and_data(launched):
    data = Images()
    options = {"plan": "auto", "processes": 2, "global_batch": 8, "stop_at": "3 steps"}
    meshwright.train(UNet, "plan.pp=2", loss=pixel_loss, data=data, out=Path("here"), **options)
    ((config, functions, processes, resume),) = launched
    assert (functions.build, functions.loss, processes, resume) == (UNet, pixel_loss, 2, None)
    assert len(functions.data) == len(data)
    assert (config.plan.mode, config.plan.pp, config.plan.stages) == ("given", 2, ("layers.3",))
    assert (str(config.train.stop_at), config.save.dir) == ("3 steps", Path("here"))
    assert config.model.source == "py:tests.pipeline.models:UNet"


def test_a_module_travels_with_its_weights(launched):
    model = UNet()
    meshwright.train(model, loss=lambda m, b: pixel_loss(m, b), data=Images(), plan="zero=1,dp=1")
    ((config, functions, _, _),) = launched
    assert functions.build().head.weight.equal(model.head.weight)
    assert (config.plan.zero, config.plan.mode) == (1, "given")


def test_run_files_and_configurations_as_before(launched, tmp_path):
    Path("run.toml").write_text("[train]\nseed = 5\n")
    meshwright.train("run.toml", "plan.zero=1", processes=2, resume="auto")
    meshwright.train(RunConfig.model_validate({"train": {"seed": 6}}), plan="zero=2")
    assert [(c.train.seed, c.plan.zero, f) for c, f, _, _ in launched] == [(5, 1, None), (6, 2, None)]


def test_a_model_alone_is_not_enough(launched):
    with pytest.raises(ConfigError, match=r"E111 meshwright.train\(type\) needs loss= and data= as well"):
        meshwright.train(UNet, loss=pixel_loss)
    assert launched == []
    assert from_python.train is meshwright.train
    assert load_config(None).config.plan.mode == "given"


NANO = find_model("gpt-nano")
CACHE = "data.cache_dir=/nowhere"  # where no host was measured


def nano() -> nn.Module:
    return build_model(NANO.family, dataclasses.asdict(NANO))


@pytest.fixture(scope="module")
def plans():
    return meshwright.plan(
        "gpt-nano", cluster="2xh100", global_batch=8, seq_len=32, plan="zero=1,micro_batch=2"
    )


def test_a_plan_from_python_is_taken_with_its_batch_and_ranks(launched, plans):
    objects = {"loss": language_model_loss, "data": Tokens(256, 32), "stop_at": "2 steps"}
    meshwright.train(nano, CACHE, plan=plans, **objects)
    ((config, functions, processes, _),) = launched
    assert functions.build is nano
    assert (processes, config.plan.mode, config.plan.zero, config.plan.dp) == (2, "given", 1, 2)
    assert (config.train.global_batch, config.data.seq_len, config.plan.micro_batch) == (8, 32, 2)
    (text,) = (path.read_text() for path in Path("runs").glob("*/resolved.toml"))
    assert "zero = 1  # the plan of meshwright.plan" in text
    assert "global_batch = 8  # meshwright.train" in text


def test_a_plan_goes_with_configurations_and_run_files(launched, plans, tmp_path):
    (tmp_path / "run.toml").write_text('[model]\nsource = "gpt-nano"\n[train]\nglobal_batch = 8\n')
    meshwright.train("run.toml", CACHE, plan=plans)
    meshwright.train(
        RunConfig.model_validate({"model": {"source": "gpt-nano"}}), CACHE, plan=plans, processes=2
    )
    path = plans.save(tmp_path / "plan.lock.json")
    meshwright.train("run.toml", "data.seq_len=32", "plan.zero=1", "plan.micro_batch=2", f"plan.lock={path}")
    found = {(c.plan.zero, c.plan.dp, c.plan.precision, c.train.global_batch, p) for c, _, p, _ in launched}
    assert len(launched) == 3
    assert found == {(1, 2, "bf16", 8, 2)}


@pytest.mark.parametrize(
    ("texts", "what"),
    [
        (["model.num_layers=8"], "another model"),
        (["train.global_batch=16"], "another batch or sequence length"),
        (["plan.zero=2"], "other fixed keys"),
        (["plan.tp=2"], "other fixed keys"),
        (['plan.memory_headroom="20%"'], "another cluster or headroom"),
        (["plan.cluster=2xa100"], "another cluster or headroom"),
    ],
)
def test_a_plan_of_something_else_is_refused(launched, plans, texts, what):
    config = RunConfig.model_validate({"model": {"source": "gpt-nano"}})
    with pytest.raises(PlanError) as caught:
        meshwright.train(config, CACHE, *texts, plan=plans)
    assert caught.value.code == "E293"
    assert f"the plan of meshwright.plan is stale: it was made for {what}" in caught.value.message
    assert "Call meshwright.plan again, or leave plan= out" in caught.value.message
    assert launched == []


def test_a_plan_of_other_models_or_ranks_is_refused(launched, plans, tmp_path):
    objects = {"loss": language_model_loss, "data": Tokens(256, 32)}
    other = dataclasses.replace(NANO, ffn_dim=2 * NANO.ffn_dim)
    build = lambda: build_model(other.family, dataclasses.asdict(other))  # noqa: E731
    with pytest.raises(PlanError, match=r"E293 .*made for another model"):
        meshwright.train(build, CACHE, plan=plans, **objects)
    path = plans.save(tmp_path / "plan.lock.json")
    fixed = ["plan.zero=1", "plan.micro_batch=2", "data.seq_len=32", "train.global_batch=8"]
    with pytest.raises(PlanError, match=r"E293 .*made for another model"):  # a file counts with objects, too
        meshwright.train(build, CACHE, *fixed, f"plan.lock={path}", **objects)
    with pytest.raises(ConfigError, match="E269"):
        meshwright.train(UNet, CACHE, plan=plans, loss=pixel_loss, data=Images())
    with pytest.raises(PlanError, match=r"E294 .*has plans for 2 devices, and 4 processes"):
        meshwright.train(nano, CACHE, plan=plans, processes=4, **objects)
    assert launched == []


def test_what_hf_returns_is_trained_with_named_data_or_a_dataset(launched):
    made = meshwright.hf(
        "llama", num_layers=2, dim=32, num_heads=4, ffn_dim=64, vocab_size=256, max_seq_len=32
    )
    plans = meshwright.plan(made, cluster="2xh100", global_batch=8, seq_len=32)
    meshwright.train(made, CACHE, data="stdlib", plan=plans, stop_at="2 steps")
    meshwright.train(made, CACHE, data=Tokens(256, 32), plan=plans, stop_at="2 steps")
    (named, nothing, _, _), (_, functions, _, _) = launched
    assert nothing is None
    assert (named.model.source, named.model.num_layers, named.data.train) == ("hf:llama", 2, "stdlib")
    assert (named.train.global_batch, named.data.seq_len, named.plan.mode) == (8, 32, "given")
    assert functions.build == made[0]
    assert functions.loss is made[1]
    with pytest.raises(
        ConfigError, match="E111 data='stdlib': a model with a loss of its own needs a dataset"
    ):
        meshwright.train(nano, loss=language_model_loss, data="stdlib")


def test_a_cluster_is_local_ranks_or_a_machine_to_plan_for(launched):
    options = {"loss": pixel_loss, "data": Images(), "global_batch": 8}
    meshwright.train(UNet, cluster="local:2", **options)
    meshwright.train(UNet, cluster="local:2", plan="zero=2", **options)
    meshwright.train(RunConfig.model_validate({"model": {"source": "gpt-nano"}}), CACHE, cluster="2xh100")
    assert [processes for _, _, processes, _ in launched] == [2, 2, 2]
    searched, given, planned = (config.plan for config, *_ in launched)
    assert (searched.stages is not None or searched.dp == 2, given.zero, planned.precision) == (
        True,
        2,
        "bf16",
    )
    text = Path("runs/run-0001/resolved.toml").read_text()
    assert "auto: " in text
    with pytest.raises(ConfigError, match="E282 cluster='local:many'"):
        meshwright.train(UNet, cluster="local:many", **options)


def test_a_result_makes_its_page(tmp_path):
    folder = make_folder(tmp_path / "run")
    result = RunResult({"steps": 6, "run_dir": str(folder)})
    assert result == {"steps": 6, "run_dir": str(folder)}
    assert result.report() == folder / "report.html"
    assert "6 steps with" in result.report(tmp_path / "page.html").read_text()
    with pytest.raises(ConfigError, match="E297"):
        result.report(tmp_path / "none" / "page.html")


class Branching(nn.Module):
    """Python looks at a value between its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        y = self.one(x)
        return y if y.sum() > 0 else y + self.two(x)


@pytest.mark.parity
def test_a_model_is_planned_trained_and_goes_on(tmp_path):
    options = {"loss": pixel_loss, "data": Images(), "processes": 2, "global_batch": 8, "out": tmp_path}
    cached = f"data.cache_dir={tmp_path / 'cache'}"
    first = meshwright.train(
        UNet, cached, "save.every=end", plan="mode=auto,pp=2,micro_batch=2", stop_at="2 steps", **options
    )
    assert (first["mesh"]["pp"], first["mesh"]["dp"], first["steps"]) == (2, 1, 2)
    seconds = list((tmp_path / "cache" / "unit-seconds").iterdir())
    more = meshwright.train(
        UNet, cached, "save.every=end", plan="auto", stop_at="3 steps", resume="auto", **options
    )
    assert (more["mesh"]["pp"], more["steps"]) == (2, 3)
    assert "kept from step-00000002" in (tmp_path / "resolved.toml").read_text()
    assert list((tmp_path / "cache" / "unit-seconds").iterdir()) == seconds


@pytest.mark.parity
def test_a_model_that_does_not_fit_or_cannot_be_cut(tmp_path):
    options = {"loss": pixel_loss, "data": Images(), "processes": 2, "global_batch": 8, "out": tmp_path}
    cached = f"data.cache_dir={tmp_path / 'cache'}"
    with pytest.raises(DoesNotFitError, match=r"E277 .* lacks [\d,]+ bytes"):
        meshwright.train(
            UNet, cached, 'plan.memory_headroom="99.9999%"', plan="auto", stop_at="2 steps", **options
        )
    branching = {**options, "loss": loss_of_labels, "data": Rows(), "stop_at": "2 steps"}
    assert meshwright.train(Branching, cached, plan="auto", **branching)["mesh"]["dp"] == 2
    assert "dp = 2  # auto: W272" in (tmp_path / "resolved.toml").read_text()
    with pytest.raises(PlanError, match=r"E279 plan.pp = 2 .* cannot be cut into stages. E261"):
        meshwright.train(Branching, cached, plan="mode=auto,pp=2", **branching)
