import pytest
import torch

from meshwright.models import Llama, LlamaConfig, initialise
from meshwright.models.llama import rotate, rotation_tables

SIZES = {
    "num_layers": 2,
    "dim": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 48,
    "vocab_size": 50,
    "max_seq_len": 12,
}


def build(**changes: object) -> Llama:
    model = Llama(LlamaConfig(**{**SIZES, **changes})).double()
    initialise(model, seed=1)
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(0))


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model, batch = build(), tokens(2, 12)
    changed = batch.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    before, after = model(batch), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-14)
    assert ((before - after).abs().amax(-1)[:, 7:] > 1e-6).all()


def test_grouped_queries_equal_repeated_key_heads() -> None:
    grouped, full = build(), build(num_kv_heads=4)
    state = grouped.state_dict()
    for name in state:
        if name.endswith(("key.weight", "value.weight")):
            state[name] = state[name].unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    batch = tokens(2, 12)
    torch.testing.assert_close(grouped(batch), full(batch), rtol=1e-12, atol=1e-13)


def test_scores_depend_on_relative_position_only() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 16, generator=generator, dtype=torch.float64)

    def score(query_position: int, key_position: int) -> float:
        turned = [
            rotate(x, *rotation_tables(torch.tensor([position]), head_dim=16, theta=10000.0))
            for x, position in ((query, query_position), (key, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), rel=1e-10)
    assert score(9, 4) == pytest.approx(score(5, 0), rel=1e-10)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_rotation_is_a_complex_product() -> None:
    x = torch.randn(1, 6, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cosine, sine = rotation_tables(torch.arange(6), head_dim=8, theta=100.0)
    turned = rotate(x, cosine, sine)
    angles = torch.outer(torch.arange(6.0), 100.0 ** -(torch.arange(4.0) / 4)).double()
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    # The angles of the expectation are float32.
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), -1), rtol=0, atol=1e-6)


def test_angles_stay_exact_far_out() -> None:
    cosine, sine = rotation_tables(torch.tensor([131_071]), head_dim=8, theta=500000.0)
    assert cosine.dtype == torch.float64
    assert float(cosine[0, 0]) == pytest.approx(float(torch.tensor(131_071.0).double().cos()), abs=1e-12)
    torch.testing.assert_close(cosine**2 + sine**2, torch.ones_like(cosine))


def test_low_precision_rotates_in_float32() -> None:
    exact = build()
    batch = tokens(2, 12)
    logits = exact(batch).detach()
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        low = build().to(dtype)
        assert low(batch).dtype == dtype
        torch.testing.assert_close(low(batch).double().detach(), logits, rtol=0, atol=tolerance)


def test_meta_built_model_equals_the_real_one() -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig(**SIZES, tied_embedding=True))
    assert model.to_empty(device="cpu").head.weight is model.token_embedding.weight
    model.double()
    initialise(model, seed=1)
    assert not list(model.buffers())
    assert torch.equal(model(tokens(2, 12)), build(tied_embedding=True)(tokens(2, 12)))


def test_all_parameters_learn() -> None:
    model = build()
    model(tokens(2, 12)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_too_long_a_sequence_names_the_limit() -> None:
    with pytest.raises(ValueError, match="13 tokens exceeds max_seq_len=12"):
        build()(tokens(1, 13))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_heads": 32, "num_kv_heads": 32}, "heads of an even width"),
        ({"num_heads": 5}, "num_heads=5 must cut dim=32"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LlamaConfig(**{**SIZES, **changes})
