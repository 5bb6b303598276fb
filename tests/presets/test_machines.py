import pickle
import subprocess
import sys

import pytest

from meshwright.errors import ConfigError
from meshwright.presets import MACHINES, find_machine, machine_of_device


@pytest.mark.parametrize(
    ("device_name", "machine"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("A100-SXM4-40GB", "a100-40"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H800", "h800"),
        ("AMD Instinct MI250X", "mi250x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_device_names_that_torch_reports(device_name: str, machine: str) -> None:
    found = machine_of_device(device_name)
    assert found is not None
    assert found.name == machine


@pytest.mark.parametrize(
    "device_name",
    [
        "NVIDIA H800 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "Tesla V100-PCIE-16GB",
        "AMD Instinct MI250X / MI250",
        "NVIDIA L40S",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "cpu",
        "",
    ],
)
def test_near_namesakes_have_no_denominator(device_name: str) -> None:
    assert machine_of_device(device_name) is None


def test_aliases_and_did_you_mean() -> None:
    assert find_machine("A100").name == "a100-80"
    with pytest.raises(ConfigError) as caught:
        find_machine("h10")
    assert caught.value.code == "E104"
    assert "unknown machine 'h10'. Did you mean 'h100'? Known: v100-16, v100, a100-40" in str(caught.value)


def test_figures_are_dense_and_in_base_units() -> None:
    h100 = find_machine("h100")
    assert h100.flops["bf16"] == 989e12
    assert h100.links["node"].bandwidth_bytes_per_second == 450e9
    assert h100.links["network"].bandwidth_bytes_per_second == 50e9
    assert "bf16" not in find_machine("v100").flops


def test_every_machine_is_plausible_and_sourced() -> None:
    for machine in MACHINES:
        assert machine.source, machine.name
        assert machine.flops["fp32"] >= 1e10, machine.name
        assert max(machine.flops.values()) <= 1e16, machine.name
        assert 1e9 <= machine.memory_bandwidth <= 1e13, machine.name
        assert machine.links["node"].bandwidth_bytes_per_second < machine.memory_bandwidth, machine.name
        assert all(1e-6 < link.latency_seconds < 1e-3 for link in machine.links.values()), machine.name


def test_half_precision_is_never_below_single() -> None:
    for machine in MACHINES:
        half = machine.flops.get("fp16", machine.flops["fp32"])
        assert half >= machine.flops["fp32"], machine.name
        assert machine.flops.get("fp8", half) >= half, machine.name


def test_machines_are_values() -> None:
    machine = find_machine("h100")
    assert pickle.loads(pickle.dumps(machine)) == machine
    assert hash(machine) == hash(find_machine("h100-80gb"))


def test_presets_import_without_torch() -> None:
    code = (
        "import sys, meshwright.presets; assert 'torch' not in sys.modules; assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
