import dataclasses
import socket

import pytest

from meshwright.cli.machine import can_bind, find_problems, inspect_machine
from meshwright.launching.gpus import Gpu, find_gpus, parse_gpus


@pytest.fixture
def sound(tmp_path):
    return dataclasses.replace(
        inspect_machine(tmp_path),
        system="Linux x86_64",
        torch="2.13.0",
        shared_memory_bytes=2**30,
        disk_free_bytes=2**34,
        loopback=True,
    )


def test_inspection_of_this_machine(tmp_path):
    machine = inspect_machine(tmp_path)
    assert machine.cores > 0
    assert machine.memory_bytes > 2**28
    assert machine.disk_free_bytes > 0
    assert machine.loopback is True


def test_gpus_of_a_listing():
    listing = "NVIDIA H200, 143771\nOdd, name, [N/A]\n\n"
    assert parse_gpus(listing) == (Gpu("NVIDIA H200", 143771 * 2**20), Gpu("Odd, name", 0))


def test_no_driver_means_no_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus() == ()


def test_a_port_in_use_is_seen():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not can_bind(port)
    assert can_bind(port)


def test_a_sound_machine_has_no_problems(sound):
    assert find_problems(sound, {}) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"torch": None}, 'pip install "meshwright[train]"'),
        ({"system": "Windows AMD64"}, "use WSL"),
        ({"loopback": False}, "127.0.0.1"),
        ({"disk_free_bytes": 2**20}, "1 MiB of disk are free"),
        ({"shared_memory_bytes": 2**26}, "64 MiB of /dev/shm are free"),
    ],
)
def test_each_problem_names_its_fix(sound, change, text):
    (problem,) = find_problems(dataclasses.replace(sound, **change), {})
    assert text in problem


def test_master_port(sound):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = str(server.getsockname()[1])
        (taken,) = find_problems(sound, {"MASTER_PORT": port})
    assert taken == f"MASTER_PORT={port} is set and in use: unset it, local runs pick a free port (E403)"
    assert find_problems(sound, {"MASTER_PORT": port}) == []
    (wrong,) = find_problems(sound, {"MASTER_PORT": "x"})
    assert wrong.startswith("MASTER_PORT=x is not a port")
