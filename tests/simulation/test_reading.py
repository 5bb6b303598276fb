"""Clusters, plans and run files as users write them."""

import pytest

from meshwright.errors import ConfigError
from meshwright.simulation.reading import layout_of, parse_cluster, parse_layout, read_run


def test_a_cluster_is_a_count_and_a_machine():
    cluster = parse_cluster("16384xa100")
    assert (cluster.machine.name, cluster.num_devices, cluster.devices_per_node) == ("a100-80", 16384, 8)
    assert cluster.nic_bytes_per_second == 8 * 25e9


def test_a_cluster_is_a_file(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(
        'machine = "h100"\ndevices = 2048\nnic_gbit_per_second = 400.0\noversubscription = 7\npod_devices = 1024\n'
    )
    cluster = parse_cluster(str(path))
    assert cluster.nic_bytes_per_second == 50e9
    assert (cluster.oversubscription, cluster.pod_devices, cluster.devices_per_node) == (7, 1024, 8)


@pytest.mark.parametrize("text", ["h100", "0xh100", "x", "8 h100"])
def test_other_forms_are_refused(text):
    with pytest.raises(ConfigError, match=r"write COUNTxMACHINE, e\.g\. 64xh100") as found:
        parse_cluster(text)
    assert found.value.code == "E282"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices = 8\n", "machine or devices is missing"),
        ('machine = "h100"\ndevices = 8\ncards = 2\n', "unknown cards"),
        ('machine = "h100"\ndevices = "8"\n', "devices='8' is not a whole number"),
        ('machine = "h100"\ndevices = 0\n', "devices=0 is not a whole number of at least 1"),
        (
            'machine = "h100"\ndevices = 8\noversubscription = 0\n',
            "oversubscription=0 is not a number above 0",
        ),
        ('machine = "h100"\ndevices = 8\nnic_gbit_per_second = 0\n', "nic_gbit_per_second=0 is not"),
    ],
)
def test_files_with_other_keys_are_refused(tmp_path, text, message):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as found:
        parse_cluster(str(path))
    assert found.value.code == "E282"


def test_an_unknown_machine_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'h100'"):
        parse_cluster("8xh1000")


def test_what_is_not_given_is_derived():
    layout = parse_layout("tp=8, pp=4,zero=1", num_devices=256)
    assert (layout.dp, layout.schedule, layout.chunks) == (8, "1f1b", 1)
    assert parse_layout("pp=4,schedule=interleaved", num_devices=4).chunks == 2
    assert layout_of({"hsdp": 8, "zero": 3, "transport": "nccl"}, num_devices=64).num_shards == 8
    # hsdp counts data-parallel ranks; each of them is cp ranks that share as well.
    assert layout_of({"hsdp": 8, "zero": 3, "cp": 2}, num_devices=64).num_shards == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=4,tp=8", "has 'tp' twice"),
        ("tp=4 pp=2", "no comma within 'tp=4 pp=2'"),
        ("tp=4;pp=2", "no comma"),
    ],
)
def test_keys_are_written_once_and_with_commas(text, message):
    with pytest.raises(ConfigError, match=message) as found:
        parse_layout(text)
    assert found.value.code == "E283"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpp=8", "no key 'tpp'. Did you mean 'tp'?"),
        ("zero=4", "plan.zero=4: write 0 to 3"),
        ("tp=0", "plan.tp=0: write a whole number of at least 1"),
        ("schedule=magic", "plan.schedule='magic' cannot be priced; take one of serial"),
        ("sequence_parallel=2", "plan.sequence_parallel=2: write true or false"),
    ],
)
def test_unknown_keys_and_values_are_refused(text, message):
    with pytest.raises(ConfigError) as found:
        parse_layout(text)
    assert found.value.code == "E283"
    assert message in found.value.message


def test_a_run_file_is_read_whatever_training_runs(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\nsource = "gpt3-175b"\n[plan]\npp = 8\n')
    assert read_run(path) == {"model": {"source": "gpt3-175b"}, "plan": {"pp": 8}}
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run(tmp_path / "none.toml")
