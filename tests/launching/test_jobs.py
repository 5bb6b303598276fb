"""Which job is started how: worker or launcher, run folders, scripts."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

from meshwright.errors import CheckpointError, PlanError, WorkerError
from meshwright.launching import jobs, launch_config, launch_script
from meshwright.training.config import load_config
from meshwright.verification.job import Functions


def _run_worker(config, *, world, run_dir, console, resume, stop, make) -> dict[str, object]:
    """Stands for the training loop, which has tests of its own."""
    console.line(f"rank {world.rank} speaks")
    assert resume is None
    assert make is None
    assert not stop()
    return {"run_dir": str(run_dir), "world_size": world.size, "seed": config.train.seed}


@pytest.fixture
def loop(monkeypatch) -> None:
    module = types.ModuleType("meshwright.training.loop")
    module.run_worker = _run_worker
    monkeypatch.setitem(sys.modules, "meshwright.training.loop", module)


def test_torchruns_worker_runs_here(loop, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a/b"}.items():
        monkeypatch.setenv(name, value)
    resolved = load_config(None, ["train.seed=7"])
    result = launch_config(resolved, json_output=False)
    assert result == {"run_dir": str(Path("runs/run-a_b")), "world_size": 2, "seed": 7}
    assert capsys.readouterr().out == "rank 0 speaks\n"
    launch_config(resolved, json_output=True)
    assert capsys.readouterr() == ("", "rank 0 speaks\n")
    monkeypatch.setenv("RANK", "1")
    assert launch_config(resolved, json_output=False) == {}
    assert capsys.readouterr().out == ""


def test_given_run_folder_is_used_as_it_is(loop, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    resolved = load_config(None, [f"save.dir={tmp_path / 'mine'}"])
    assert launch_config(resolved, json_output=True)["run_dir"] == str(tmp_path / "mine")


def test_local_launch_passes_processes_and_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    calls = []
    monkeypatch.setattr(jobs, "run_local", lambda target, **given: calls.append(given) or [{"steps": 3}, {}])
    monkeypatch.setattr(jobs, "num_gpus", lambda environment: 4)
    assert launch_config(load_config(None), json_output=False) == {"steps": 3}
    launch_config(load_config(None, ["plan.processes=3", "train.global_batch=33"]), json_output=False)
    launch_config(load_config(None, ["plan.dp=2"]), json_output=False)
    folders = [Path(f"runs/run-000{number}") for number in (1, 2, 3)]
    assert [(call["processes"], call["run_dir"]) for call in calls] == list(
        zip((4, 3, 2), folders, strict=True)
    )
    assert load_config(folders[1] / "resolved.toml").config.train.global_batch == 33


def checkpoint(run_dir: Path, step: int = 4) -> Path:
    path = run_dir / "ckpt" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    return path


def test_where_a_run_goes_on(tmp_path, monkeypatch) -> None:
    """Run folder, and where a checkpoint is looked for, of (resume, save.dir, worker of torchrun)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    for number in (1, 2, 10):
        Path(f"runs/run-{number:04d}").mkdir(parents=True)
    checkpoint(Path("runs/run-0001"))
    newest, imported = checkpoint(Path("runs/run-0002")), Path("imported")
    imported.mkdir()
    (imported / "manifest.json").write_text("{}")

    def where(resume, *overrides, worker=False):
        run_dir, found = jobs._run_dir(load_config(None, overrides), resume, worker=worker)
        return str(run_dir), found and (str(found.place), found.required)

    assert where("auto") == ("runs/run-0002", ("runs/run-0002", False))
    assert where("auto", "save.dir=mine") == ("mine", ("mine", False))
    assert where("auto", worker=True) == ("runs/run-job7", ("runs/run-job7", False))
    assert where(None, worker=True) == ("runs/run-job7", None)
    for place in (newest, newest.parent, Path("runs/run-0002")):
        assert where(str(place)) == ("runs/run-0002", (str(place), True))
        assert where(str(place), "save.dir=mine") == ("mine", (str(place), True))
    assert where("imported") == ("runs/run-0011", ("imported", True))
    assert where("imported", worker=True) == ("runs/run-job7", ("imported", True))
    assert where(None) == ("runs/run-0012", None)
    with pytest.raises(CheckpointError, match=r"E503 --resume runs/run-0010: there is no checkpoint"):
        where("runs/run-0010")


def test_auto_without_any_checkpoint_is_a_new_run(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir, found = jobs._run_dir(load_config(None), "auto", worker=False)
    assert (str(run_dir), found.required) == ("runs/run-0001", False)


def test_a_plan_that_cannot_run_starts_no_process(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "run_local", lambda *_, **__: pytest.fail("processes were started"))
    with pytest.raises(PlanError, match=r"E203 global_batch 32 ≠ dp 3 .*Nearest: 30 \(k=10\), 33 \(k=11\)"):
        launch_config(load_config(None, ["plan.processes=3"]), json_output=False)
    with pytest.raises(PlanError, match=r"E200 .*dp 4 = 4, but 2 processes started.*plan\.dp=2"):
        launch_config(load_config(None, ["plan.processes=2", "plan.dp=4"]), json_output=False)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "a"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, False),  # the batch script's own shell
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "a"}, False),
    ],
)
def test_who_is_a_worker(environment: dict[str, str], expected: bool) -> None:
    assert jobs.is_worker(environment) is expected


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"SLURM_JOB_ID": "12"}, "job12"),
        ({"TORCHELASTIC_RUN_ID": "x y"}, "x_y"),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "1234"}, "port1234"),
    ],
)
def test_names_of_jobs(environment: dict[str, str], name: str) -> None:
    assert jobs.job_name(environment) == name


def test_hidden_gpus_do_not_count(tmp_path, monkeypatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    real = Path
    monkeypatch.setattr(jobs, "Path", lambda text: tmp_path if text == "/dev" else real(text))
    assert jobs.num_gpus({}) == 2
    assert jobs.num_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == 1
    assert jobs.num_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0


SCRIPT = """
import os, sys
import helper_beside_the_script
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], __name__, *sys.argv[1:], flush=True)
if "fail" in sys.argv and os.environ["RANK"] == "1":
    sys.exit(3)
if "crash" in sys.argv and os.environ["RANK"] == "1":
    raise ValueError("of the user")
"""


@pytest.fixture
def script(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper_beside_the_script.py").touch()
    (tmp_path / "mine.py").write_text(SCRIPT)
    return tmp_path / "mine.py"


def test_script_runs_as_main_and_rank_0_keeps_the_terminal(script, capfd) -> None:
    assert launch_script(script, processes=2, arguments=["a", "b"]) == 0
    assert capfd.readouterr().out == "rank 0 of 2 __main__ a b\n"
    assert Path("runs/mine-0001/logs/rank1.log").read_text() == "rank 1 of 2 __main__ a b\n"


def test_failing_scripts_are_named(script) -> None:
    with pytest.raises(WorkerError, match=r"^E401 rank 1 exited with code 3"):
        launch_script(script, processes=2, arguments=["fail"])
    with pytest.raises(
        WorkerError, match=r"^E401 rank 1 raised ValueError: of the user\n(.*\n)*.*mine.py"
    ) as caught:
        launch_script(script, processes=2, arguments=["crash"])
    assert "<frozen runpy>" not in caught.value.message


def test_script_of_torchruns_worker_runs_here(script) -> None:
    code = (
        "import sys; from pathlib import Path; from meshwright.launching import launch_script\n"
        "raise SystemExit(launch_script(Path('mine.py'), processes=9, arguments=['x']))"
    )
    environment = {"RANK": "0", "WORLD_SIZE": "2", "PATH": ""}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "rank 0 of 2 __main__ x\n"), ended.stderr


def test_a_model_that_is_an_object_is_not_planned_as_the_default_preset(loop, tmp_path, monkeypatch) -> None:
    # `model.source` is gpt-nano where nobody wrote it: the planner took that for the model of the run.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(jobs, "plan_of_run", lambda resolved: pytest.fail("the planner was asked"))
    monkeypatch.setattr(jobs, "_run_worker", lambda *arguments, **_: {"functions": arguments[1] is not None})
    functions = Functions(dict, max, ())
    assert launch_config(load_config(None, []), json_output=False, functions=functions) == {"functions": True}
