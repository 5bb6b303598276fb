import json
import subprocess
import tomllib

import pytest
from typer.testing import CliRunner

from meshwright.cli import doctor
from meshwright.cli.main import app
from meshwright.cli.measurement import measure
from meshwright.errors import WorkerError
from meshwright.launching.this_host import known_host
from meshwright.presets.host import HostProfile

MEASURED = {
    "device": "NVIDIA H200",
    "num_threads": 2,
    "products": [
        {"dtype": "fp32", "size": 256, "seconds": 1e-3, "flops_per_second": 2 * 256**3 / 1e-3},
        {"dtype": "fp32", "size": 512, "seconds": 4e-3, "flops_per_second": 2 * 512**3 / 4e-3},
    ],
    "copy_bytes_per_second": 1e10,
    "peak_flops_per_second": {},
}
HOST = HostProfile("here", 2, 1 << 30, 1 << 20, 1e-3, 1e-3, 1e-3, 1e-3, 1e-9, 1e-9, ())


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("meshwright.launching.this_host._run", lambda order, processes: [])
    monkeypatch.setattr("meshwright.launching.this_host._new_host", lambda found: HOST)
    return lambda *arguments: CliRunner().invoke(app, ["doctor", *arguments])


def test_text(invoke, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    result = invoke()
    assert result.exit_code == 0
    names = [line.split()[0] for line in result.stdout.splitlines()]
    assert names[:8] == ["system", "cores", "memory", "gpus", "/dev/shm", "disk", "loopback", "launch"]
    assert set(names[8:]) == {"problem"}
    assert "WORLD_SIZE=16" in result.stdout


def test_json(invoke):
    report = json.loads(invoke("--json").stdout)
    assert report["loopback"] is True
    assert report["measured"] is None
    assert isinstance(report["problems"], list)


def test_measured_machine_is_written_as_a_cluster(invoke, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "measure_machine", lambda: MEASURED)
    result = invoke("--measure")
    assert result.exit_code == 0, result.exception
    cluster = tomllib.loads((tmp_path / "cluster.toml").read_text())
    assert cluster["machine"]["name"] == "NVIDIA H200"
    assert cluster["machine"]["flops"]["fp32"] == pytest.approx(2 * 512**3 / 4e-3, rel=1e-5)
    assert [row["size"] for row in cluster["products"]] == [256, 512]
    assert " 50.0% of the best product here" in result.stdout
    kept = tmp_path / "cache" / "meshwright"
    assert f"wrote cluster.toml and {kept}" in result.stdout
    assert known_host(kept) == HOST


def test_share_of_a_known_peak(invoke, monkeypatch):
    known = {**MEASURED, "peak_flops_per_second": {"fp32": 67.1088640e9 * 2}}
    monkeypatch.setattr(doctor, "measure_machine", lambda: known)
    assert " 50.0% of the data sheet's 0.134218 TFLOP/s (HFU)" in invoke("--measure").stdout


def test_measurement_counts_the_flops_of_a_product():
    measured = measure((32, 64), copy_bytes=2**16)
    assert [row["size"] for row in measured["products"]] == [32, 64] * 2
    for row in measured["products"]:
        assert row["flops_per_second"] * row["seconds"] == pytest.approx(2 * row["size"] ** 3)
    assert measured["copy_bytes_per_second"] > 0
    assert measured["peak_flops_per_second"] == {} or measured["device"] != "cpu"


def test_a_failed_measurement_shows_its_last_lines(monkeypatch):
    done = subprocess.CompletedProcess([], 1, "", "Traceback\n  somewhere\nRuntimeError: no\n")
    monkeypatch.setattr(subprocess, "run", lambda *_arguments, **_options: done)
    with pytest.raises(WorkerError, match="ended with code 1") as caught:
        doctor.measure_machine()
    assert caught.value.code == "E401"
    assert "RuntimeError: no" in caught.value.message
