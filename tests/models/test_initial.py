import itertools
import tracemalloc

import pytest
import torch
from torch import nn

from meshwright.models import GPT, MLP, GPTConfig, Initial, MLPConfig, draw, draw_into, initialise

NORMAL = Initial("normal", 0.5)


def tiny_gpt() -> GPT:
    return GPT(GPTConfig(num_layers=2, dim=16, num_heads=2, ffn_dim=32, vocab_size=11, max_seq_len=8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_any_cut_gives_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    initial = Initial(kind, 0.02)
    numel = 150_001
    whole = draw(initial, seed=7, name="w", start=0, stop=numel, dtype=dtype)
    for cuts in (
        [0, 1, 2, 3, 4, 5, 70_003, numel],
        [0, 65_535, 65_536, 65_537, 131_073, numel],
        [0, 0, numel],
    ):
        pieces = [
            draw(initial, seed=7, name="w", start=start, stop=stop, dtype=dtype)
            for start, stop in itertools.pairwise(cuts)
        ]
        assert torch.equal(torch.cat(pieces), whole)


def test_each_element_alone_equals_the_whole() -> None:
    whole = draw(NORMAL, seed=1, name="w", start=0, stop=40, dtype=torch.float64)
    alone = [draw(NORMAL, seed=1, name="w", start=i, stop=i + 1, dtype=torch.float64) for i in range(40)]
    assert torch.equal(torch.cat(alone), whole)


def test_number_of_threads_changes_no_bit() -> None:
    threads = torch.get_num_threads()
    try:
        drawn = []
        for count in (1, 2):
            torch.set_num_threads(count)
            drawn.append(draw(NORMAL, seed=1, name="w", start=3, stop=100_000, dtype=torch.float32))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*drawn)


def test_far_elements_are_reached_directly() -> None:
    start = 3 * 10**11 + 1
    values = draw(NORMAL, seed=1, name="w", start=start, stop=start + 8, dtype=torch.float64)
    later = draw(NORMAL, seed=1, name="w", start=start + 5, stop=start + 8, dtype=torch.float64)
    assert torch.equal(values[5:], later)
    assert values.unique().numel() == 8


def test_seed_and_name_give_other_values() -> None:
    arguments = {"start": 0, "stop": 64, "dtype": torch.float64}
    first = draw(NORMAL, seed=1, name="a", **arguments)
    # "1" + "1a" and "11" + "a" must not meet in the hash.
    others = [(2, "a"), (1, "b"), (11, "a"), (1, "1a"), (-1, "a")]
    for seed, name in others:
        assert not torch.equal(first, draw(NORMAL, seed=seed, name=name, **arguments))
    assert not torch.equal(
        draw(NORMAL, seed=11, name="a", **arguments), draw(NORMAL, seed=1, name="1a", **arguments)
    )


def test_values_pinned_so_that_seeds_keep_their_meaning() -> None:
    values = draw(Initial("normal"), seed=0, name="w", start=0, stop=3, dtype=torch.float64)
    expected = torch.tensor([1.479692441346291, 0.5303261747502616, -0.24659888760287], dtype=torch.float64)
    torch.testing.assert_close(values, expected, rtol=1e-13, atol=0)


def test_moments_of_the_normal() -> None:
    values = draw(NORMAL, seed=3, name="w", start=0, stop=1_000_000, dtype=torch.float64) / NORMAL.scale
    assert values.isfinite().all()
    # Standard errors at one million: 0.001, 0.0014, 0.0024 and 0.0098; the bounds are five of them.
    assert abs(values.mean()) < 5e-3
    assert abs(values.pow(2).mean() - 1) < 7e-3
    assert abs(values.pow(3).mean()) < 2e-2
    assert abs(values.pow(4).mean() - 3) < 5e-2
    assert abs((values[:-1] * values[1:]).mean()) < 5e-3


def test_range_of_the_uniform() -> None:
    values = draw(Initial("uniform", 0.25), seed=3, name="w", start=0, stop=100_000, dtype=torch.float64)
    assert -0.25 < values.min() < -0.2499
    assert 0.2499 < values.max() < 0.25
    assert abs(values.mean()) < 3e-3


def test_constants() -> None:
    arguments = {"seed": 0, "name": "w", "start": 5, "stop": 9, "dtype": torch.float32}
    assert torch.equal(draw(Initial("zeros"), **arguments), torch.zeros(4))
    assert torch.equal(draw(Initial("ones", 3.0), **arguments), torch.ones(4))


def test_random_words_are_made_in_small_pieces() -> None:
    out = torch.empty(4_000_000)
    tracemalloc.start()
    draw_into(out, NORMAL, seed=0, name="w", start=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**21


def test_model_starts_as_its_pieces_say() -> None:
    model = tiny_gpt()
    initialise(model, seed=5)
    values = model.initial_values()
    assert set(values) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        half = parameter.numel() // 2
        pieces = [
            draw(values[name], seed=5, name=name, start=start, stop=stop, dtype=parameter.dtype)
            for start, stop in ((0, half), (half, parameter.numel()))
        ]
        assert torch.equal(torch.cat(pieces), parameter.detach().flatten()), name


def test_gpt_and_mlp_scales() -> None:
    model = tiny_gpt()
    values = model.initial_values()
    assert values["token_embedding.weight"] == Initial("normal", 0.02)
    assert values["blocks.1.attention.output.weight"] == Initial("normal", 0.01)
    assert values["blocks.0.feed_forward.down.weight"] == Initial("normal", 0.01)
    assert values["final_norm.weight"] == Initial("ones")
    assert values["blocks.0.attention_norm.bias"] == Initial("zeros")
    mlp = MLP(MLPConfig(num_layers=2, dim=6, input_dim=24, num_classes=3))
    assert mlp.initial_values()["blocks.0.weight"] == Initial("uniform", 0.5)
    assert mlp.initial_values()["head.weight"] == Initial("uniform", 1.0)


def test_initialise_refuses_a_parameter_without_a_start() -> None:
    model = tiny_gpt()
    model.extra = nn.Parameter(torch.zeros(3))
    model.initial_values = lambda: {}
    with pytest.raises(ValueError, match=r"differ in blocks.0.attention.key.bias, .*extra.*; name each once"):
        initialise(model, seed=0)
