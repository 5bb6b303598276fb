import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from meshwright.errors import ConfigErrors
from meshwright.training.config import (
    KNOWN_KEYS,
    RunConfig,
    default_cache_dir,
    launch_environment,
    load_config,
)
from meshwright.training.peers import PEER_NAMES, find_peer_name
from meshwright.training.units import Span, StopAt

EXAMPLES = Path(__file__).parents[2] / "examples"


def problems_of(path=None, overrides=()):
    with pytest.raises(ConfigErrors) as caught:
        load_config(path, overrides)
    return str(caught.value).splitlines()


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write_file(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path.relative_to(tmp_path)

    return write_file


def test_defaults_are_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    resolved = load_config(None)
    config = resolved.config
    assert (config.model.source, config.data.train, config.data.seq_len) == ("preset:gpt-nano", "stdlib", 128)
    assert (config.plan.zero, config.plan.transport, config.plan.precision) == (0, "auto", "fp32")
    assert config.data.cache_dir == tmp_path / "meshwright" == default_cache_dir()
    assert set(resolved.origins.values()) == {"default"}
    assert set(resolved.origins) == set(KNOWN_KEYS)


def test_precedence_and_origins(write):
    write("shared/base.toml", "[train]\nseed = 1\nstop_at = '1 step'\n[plan]\nzero = 1\ndp = 4\n")
    run = write(
        "run.toml",
        'base = "shared/base.toml"\n[train]\nstop_at = "2 steps"\nglobal_batch = 8\n[plan]\ndp = 2\n',
    )
    resolved = load_config(
        run,
        ["train.global_batch=16", "plan.dp=1"],
        built_in={"train": {"seed": 9, "deterministic": True}},
        built_in_name="demo",
    )
    train, plan = resolved.config.train, resolved.config.plan
    assert (train.seed, train.stop_at, train.global_batch) == (1, StopAt(2, "steps"), 16)
    assert (train.deterministic, plan.zero, plan.dp) == (True, 1, 1)
    shown = {key: resolved.origins[key] for key in ("train.seed", "train.stop_at", "train.global_batch")}
    assert shown == {
        "train.seed": "shared/base.toml:2",
        "train.stop_at": "run.toml:3",
        "train.global_batch": "command line",
    }
    assert resolved.origins["train.deterministic"] == "demo"
    assert resolved.origins["plan.zero"] == "shared/base.toml:5"
    assert resolved.origins["plan.dp"] == "command line"
    assert resolved.origins["plan.tp"] == "default"


def test_a_run_folder_is_named_after_the_run_file(write):
    assert str(load_config(write("tiny.toml", "")).config.save.dir) == "runs/tiny"
    assert str(load_config(write("tiny.toml", '[save]\ndir = "x"\n')).config.save.dir) == "x"


def test_base_errors(write):
    write("a.toml", 'base = "b.toml"\n')
    write("b.toml", '\nbase = "a.toml"\n')
    assert problems_of(write("a.toml", 'base = "b.toml"\n')) == [
        "E100 b.toml:2  base = 'a.toml' closes a circle; remove one"
    ]
    (missing,) = problems_of(write("c.toml", 'base = "none.toml"\n'))
    assert missing.startswith("E100 c.toml:1  cannot read 'none.toml': no such file or directory.")
    (wrong,) = problems_of(write("d.toml", 'base = ["a.toml"]\n'))
    assert wrong == 'E109 d.toml:1  base = ["a.toml"]: one file name, relative to this file'


def test_files_that_cannot_be_read(write, tmp_path):
    (missing,) = problems_of(tmp_path / "none.toml")
    assert missing.startswith("E100 cannot read")
    (syntax,) = problems_of(write("bad.toml", "[train]\nstop_at = 5 steps\n"))
    assert syntax.startswith("E100 bad.toml:2  not valid TOML")
    (tmp_path / "bytes.toml").write_bytes(b"a = '\xff'")
    (encoding,) = problems_of(tmp_path / "bytes.toml")
    assert "not UTF-8 at byte 5" in encoding


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("plan.zero=1", ("plan", "zero"), 1),
        ("train.stop_at=20 steps", ("train", "stop_at"), StopAt(20, "steps")),
        ('train.stop_at="20 steps"', ("train", "stop_at"), StopAt(20, "steps")),
        ("model.source=gpt2", ("model", "source"), "preset:gpt2-124m"),
        ("model.source=llama-nano", ("model", "source"), "preset:llama-nano"),
        ("data.packing=false", ("data", "packing"), False),
        ("data.train=text:a=b", ("data", "train"), "text:a=b"),
        ("train.schedule.decay=10%", ("train", "schedule", "decay"), Span(10, "%")),
        ("train.optimizer={name='sgd', momentum=0.9}", ("train", "optimizer", "name"), "sgd"),
        ("train.clip_norm=0", ("train", "clip_norm"), None),
        ("log.to=['tensorboard']", ("log", "to"), ("tensorboard",)),
        ("plan.bucket_bytes=25 MiB", ("plan", "bucket_bytes"), 25 * 2**20),
    ],
)
def test_overrides(override, key, expected):
    value = load_config(None, [override]).config
    for part in key:
        value = getattr(value, part)
    assert value == expected


@pytest.mark.parametrize("text", ["plan.zero", "=1", "plan.zero=", "--zero"])
def test_an_argument_that_is_no_override(text):
    (line,) = problems_of(None, [text])
    assert line.startswith(f"E100 command line  {text!r} is not of the form a.b=c")


def test_all_problems_come_in_one_list_with_their_lines(write):
    run = write(
        "run.toml",
        """[train]
global_bacth = 3
stop_at = "20G"
optimizer = { name = "adamv", lrr = 1 }
[parallel]
tensor_parallel_degree = 2
[plan]
ep = 2
zero = 7
stages = [
  0,
]
""",
    )
    assert problems_of(run, ["data.seed=1", "train.optimizer.betas=[0.9, 1.0]"]) == [
        "E101 run.toml:2  unknown key 'train.global_bacth'. Did you mean 'train.global_batch'?",
        "E101 run.toml:4  unknown key 'train.optimizer.lrr'. Did you mean 'train.optimizer.lr'?",
        "E101 run.toml:6  'parallel.tensor_parallel_degree' is torchtitan's name. Here: plan.tp",
        "E101 command line  unknown key 'data.seed'. Did you mean 'train.seed'?",
        'E102 run.toml:3  train.stop_at = "20G": no unit. Write "20B tokens", "5000 steps", "2 epochs" or "6h".',
        "E109 run.toml:4  train.optimizer.name = \"adamv\": must be 'adamw', 'adam', 'sgd' or 'muon'. "
        "Did you mean 'adam'?",
        "E109 command line  train.optimizer.betas = [0.9, 1.0]: both betas lie in [0, 1), e.g. [0.9, 0.95]",
        "E109 run.toml:9  plan.zero = 7: must be 0, 1, 2 or 3",
        "E109 run.toml:10  plan.stages = [0]: must be a valid string",
        "E110 run.toml:8  plan.ep = 2 is not built yet; built: ep = 1",
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train=5", "E109 command line  train = 5: train is a table; set one of train.global_batch, "),
        ("train.optimizer=sgd", 'E109 command line  train.optimizer = "sgd": train.optimizer is a table'),
        ("nonsense.xyz=1", "E101 command line  unknown key 'nonsense.xyz'. `meshwright config show` lists"),
        ("lr=1", "E101 command line  unknown key 'lr'. Did you mean 'train.optimizer.lr'?"),
        (
            "train_batch_size=8",
            "E101 command line  'train_batch_size' is DeepSpeed's name. Here: train.global",
        ),
        (
            "zero_optimization.stage=2",
            "E101 command line  'zero_optimization.stage' is DeepSpeed's name. Here: pl",
        ),
        (
            "gradient_accumulation_steps=4",
            "E101 command line  'gradient_accumulation_steps' is DeepSpeed's name. ",
        ),
        ("train.seed=true", "E109 command line  train.seed = true: must be a valid integer"),
        ('train.seed="3"', 'E109 command line  train.seed = "3": must be a valid integer'),
        ("train.seed=-1", "E109 command line  train.seed = -1: must be greater than or equal to 0"),
        ("train.optimizer.lr=inf", "E109 command line  train.optimizer.lr = inf: must be a finite number"),
        (
            "data.train=stdlb",
            'E108 command line  data.train = "stdlb": no reader of this name. Did you mean \'std',
        ),
        ("data.train=hf:", 'E108 command line  data.train = "hf:": name what it reads: hf:PATH_OR_ID'),
        (
            "model.source=py:a",
            'E109 command line  model.source = "py:a": write "preset:NAME", "hf:PATH_OR_ID" or',
        ),
        (
            "model.source=gpt-nanoo",
            "E104 command line  model.source = \"gpt-nanoo\": unknown model preset 'gpt-nanoo'. Did",
        ),
        ("model.source=hf:", 'E109 command line  model.source = "hf:": write "preset:NAME", "hf:PATH_OR_ID"'),
        (
            "model.init=pretrained",
            'E109 command line  model.init = "pretrained": only an "hf:" model has it, not "pre',
        ),
        ("model.task=masked_lm", 'E109 command line  model.task = "masked_lm": only an "hf:" model has it'),
        ("plan.recompute=some", "E240 command line  plan.recompute = \"some\": 'some' is none of none"),
        (
            "plan.recompute=every:0",
            'E240 command line  plan.recompute = "every:0": behind every stands a number',
        ),
        (
            "train.stop_at=60 s",
            'E109 command line  train.stop_at = "60 s": the number of steps is not known then',
        ),
    ],
)
def test_error_texts(override, line):
    (found,) = problems_of(None, [override])
    assert found.startswith(line)


def test_a_run_of_seconds_needs_a_schedule_without_a_total():
    constant = "train.schedule.name=constant"
    (line,) = problems_of(None, ["train.stop_at=60 s", constant])
    assert 'train.schedule.warmup = "5%" needs it. Set train.schedule.warmup = "100 steps"' in line
    config = load_config(None, ["train.stop_at=60 s", constant, "train.schedule.warmup=100 steps"]).config
    assert config.train.stop_at == StopAt(60, "seconds")


@pytest.mark.parametrize(
    "override",
    [
        "plan.ep=2",
        "log.to=['wandb']",
    ],
)
def test_what_is_not_built_is_refused(override):
    (line,) = problems_of(None, [override])
    key = override.split("=")[0]
    assert line.startswith(f"E110 command line  {key} = ")
    assert "is not built yet; built: " in line


def test_settings_without_effect_warn():
    overrides = ["train.optimizer.momentum=0.9", "train.schedule.decay=10%"]
    assert [text.split("  ")[1].split(" =")[0] for text in load_config(None, overrides).warnings] == [
        "train.optimizer.momentum",
        "train.schedule.decay",
    ]
    used = [*overrides, "train.optimizer.name=sgd", "train.schedule.name=wsd"]
    assert load_config(None, used).warnings == ()


def test_written_configuration_reads_back(write):
    resolved = load_config(
        None, ["train.stop_at=20B tokens", "plan.bucket_bytes=1 MiB", "log.to=['tensorboard']"]
    )
    again = load_config(write("resolved.toml", resolved.as_toml()))
    assert again.config == resolved.config
    assert 'stop_at = "20000000000 tokens"  # command line' in resolved.as_toml()


def test_resolved_travels_by_pickle():
    resolved = load_config(None, ["plan.zero=1"])
    assert pickle.loads(pickle.dumps(resolved)) == resolved


def test_models_are_frozen_and_typed():
    config = RunConfig()
    with pytest.raises(ValidationError):
        config.train.seed = 3
    with pytest.raises(ValidationError):
        RunConfig.model_validate({"train": {"sede": 3}})


def test_every_key_is_documented():
    schema = RunConfig.model_json_schema()
    undocumented = [
        f"{name}.{field}"
        for name, table in schema["$defs"].items()
        for field, entry in table["properties"].items()
        if not entry.get("description")
    ]
    assert undocumented == []
    assert schema["additionalProperties"] is False


def test_peers_names_lead_to_keys_that_exist():
    for row in PEER_NAMES:
        words = re.findall(r"[a-z_.]+[a-z_]", row.here)
        named = [word for word in words if word.split(".")[0] in RunConfig.model_fields and "." in word]
        assert named, f"{row} names no key"
        assert set(named) <= set(KNOWN_KEYS), row
        assert row.name not in KNOWN_KEYS
    assert find_peer_name("--tensor-model-parallel-size".lstrip("-")).here == "plan.tp"


@pytest.mark.parametrize("name", ["stdlib", "digits"])
def test_examples_are_valid(name):
    resolved = load_config(EXAMPLES / f"{name}.toml")
    assert resolved.warnings == ()
    assert resolved.config.plan.processes == 2


def test_launch_environment_holds_what_is_set(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    found = launch_environment()
    assert found["MASTER_PORT"] == "29500"
    assert "WORLD_SIZE" not in found


def test_config_needs_no_torch():
    code = "import meshwright.training.config, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
