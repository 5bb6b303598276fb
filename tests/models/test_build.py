from dataclasses import asdict

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.models import build_model
from meshwright.presets import MODELS, ModelPreset, find_model, matmul_flops_per_token, num_parameters

TRAINABLE = [preset for preset in MODELS if preset.family in ("gpt", "llama", "mlp")]


@pytest.mark.parametrize("preset", TRAINABLE, ids=lambda preset: preset.name)
def test_built_parameters_equal_the_formula(preset: ModelPreset) -> None:
    with torch.device("meta"):
        model = build_model(preset.family, asdict(preset))
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(preset)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["gpt-nano", "llama-nano"])
def test_tying_removes_one_table(name: str, tied: bool) -> None:
    preset = find_model(name).with_changes(tied_embedding=tied)
    model = build_model(preset.family, asdict(preset))
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(preset)


@pytest.mark.parametrize("name", ["gpt-nano", "llama-nano", "mlp-digits"])
def test_flops_equal_those_counted_on_the_module(name: str) -> None:
    preset = find_model(name).with_changes(num_layers=2)
    model = build_model(preset.family, asdict(preset))
    batch, seq_len = (5, 1) if preset.family == "mlp" else (3, 32)
    shape = (batch, preset.input_dim) if preset.family == "mlp" else (batch, seq_len)
    inputs = torch.ones(shape) if preset.family == "mlp" else torch.zeros(shape, dtype=torch.long)
    # The counter has no formula for the fused CPU kernel; the math kernel computes the full square.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(inputs)
    expected = matmul_flops_per_token(preset, seq_len, causal=False) * batch * seq_len
    assert 3 * counter.get_total_flops() == expected


def test_family_without_a_module_is_named() -> None:
    with pytest.raises(ValueError, match="family 'bert'; trainable: gpt, llama, mlp"):
        build_model("bert", asdict(find_model("bert-large")))
