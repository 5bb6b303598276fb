import pickle

import pytest

from meshwright.errors import ConfigError
from meshwright.presets import find_model


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("gpt2", "gpt2-124m"),
        ("llama-3-8b", "llama-3.1-8b"),
        ("Meta-Llama/Llama-3.1-70B", "llama-3.1-70b"),
        (" GPT-NANO ", "gpt-nano"),
    ],
)
def test_aliases_ignore_case(alias: str, name: str) -> None:
    assert find_model(alias).name == name


def test_unknown_model_names_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError) as caught:
        find_model("gpt-nona")
    assert caught.value.code == "E104"
    assert "unknown model preset 'gpt-nona'. Did you mean 'gpt-nano'? Known: gpt-nano, " in str(caught.value)
    assert "llama-3.1-405b" in str(caught.value)


def test_unlike_any_model_gives_no_silly_hint() -> None:
    with pytest.raises(ConfigError, match="E104") as caught:
        find_model("zzzz")
    assert "Did you mean" not in str(caught.value)


def test_changes_are_applied_and_the_rest_kept() -> None:
    preset = find_model("llama-nano")
    changed = preset.with_changes(num_layers=2, ffn_dim=64)
    assert (changed.num_layers, changed.ffn_dim, changed.dim) == (2, 64, preset.dim)


def test_heads_of_a_gpt_change_together() -> None:
    changed = find_model("gpt-nano").with_changes(num_heads=8)
    assert (changed.num_heads, changed.num_kv_heads) == (8, 8)
    assert find_model("llama-nano").with_changes(num_heads=8).num_kv_heads == 2


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        (
            "gpt-nano",
            {"num_heads": 5},
            "num_heads=5 does not divide dim=128; use one of 1 2 4 8 16 32 64 128",
        ),
        ("llama-nano", {"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=4; use one of 1 2 4"),
        ("gpt-nano", {"num_kv_heads": 2}, "use num_kv_heads=4, or a llama"),
        ("llama-nano", {"num_heads": 128, "num_kv_heads": 2}, "is odd, .*use num_heads of 1 2 4 8 16 32 64$"),
        ("llama-nano", {"dim": 3, "num_heads": 1, "num_kv_heads": 1}, "use an even dim"),
        ("mixtral-8x7b", {"experts_per_token": 9}, r"experts_per_token=9 exceeds num_experts=8; use 1\.\.8"),
        ("gpt-nano", {"num_layers": 0}, "num_layers=0; a gpt needs num_layers >= 1"),
        ("gpt-nano", {"num_experts": 4}, "num_experts=4, but a gpt has no num_experts"),
        ("gpt-nano", {"dim": 1.5}, "dim=1.5 is not a whole number"),
        ("gpt-nano", {"num_layer": 2}, "no number 'num_layer'. Did you mean 'num_layers'?"),
        ("gpt-nano", {"family": 2}, "no number 'family'"),
    ],
)
def test_bad_numbers_name_value_rule_and_choice(name: str, changes: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        find_model(name).with_changes(**changes)
    assert caught.value.code == "E106"


def test_presets_travel_to_workers() -> None:
    preset = find_model("llama-nano")
    assert pickle.loads(pickle.dumps(preset)) == preset
