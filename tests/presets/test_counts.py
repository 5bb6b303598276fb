import pytest

from meshwright.presets import MODELS, find_model, matmul_flops_per_token, matmul_parameters, num_parameters


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("bert-large", 335_174_458),
    ],
)
def test_num_parameters_of_published_models(name: str, expected: int) -> None:
    assert num_parameters(find_model(name)) == expected


def test_gpt_nano_is_small_enough_for_the_demo() -> None:
    assert 0.7e6 < num_parameters(find_model("gpt-nano")) < 0.9e6


@pytest.mark.parametrize(
    ("name", "billions", "digits"), [("gpt3-175b", 175.0, 0.005), ("gpt-1t", 1008.0, 0.001)]
)
def test_sizes_that_papers_only_round(name: str, billions: float, digits: float) -> None:
    assert num_parameters(find_model(name)) / 1e9 == pytest.approx(billions, rel=digits)


def test_flops_follow_the_published_formula_of_gpt() -> None:
    # Narayanan et al. 2021 without recomputation: 72 B s L h^2 (1 + s/(6h) + V/(12 L h)) per batch.
    preset = find_model("gpt3-175b")
    s, layers, h, vocab = 2048, preset.num_layers, preset.dim, preset.vocab_size
    expected = 72 * layers * h * h * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert matmul_flops_per_token(preset, s, causal=False) == pytest.approx(expected, rel=1e-12)


def test_causal_convention_halves_attention_only() -> None:
    preset = find_model("llama-3.1-8b")
    full = matmul_flops_per_token(preset, 8192, causal=False)
    half = matmul_flops_per_token(preset, 8192, causal=True)
    assert full - half == 6 * preset.num_layers * preset.dim * 8192
    assert matmul_flops_per_token(preset, 0, causal=False) == 6 * matmul_parameters(preset)


def test_mixture_counts_active_experts_only() -> None:
    preset = find_model("mixtral-8x7b")
    active = matmul_parameters(preset) + preset.vocab_size * preset.dim
    assert active / 1e9 == pytest.approx(12.88, abs=0.02)


def test_bidirectional_model_refuses_the_causal_convention() -> None:
    with pytest.raises(AssertionError, match="both directions"):
        matmul_flops_per_token(find_model("bert-large"), 512, causal=True)


def test_every_preset_has_a_source_and_unique_spellings() -> None:
    spellings = [spelling.lower() for preset in MODELS for spelling in (preset.name, *preset.aliases)]
    assert len(spellings) == len(set(spellings))
    assert all(preset.source for preset in MODELS)
