import pytest
import torch
from torch.nn import functional as F

from meshwright.models import GPT, GPTConfig, initialise

SIZES = {"num_layers": 2, "dim": 32, "num_heads": 4, "ffn_dim": 64, "vocab_size": 50, "max_seq_len": 12}


def build(**changes: object) -> GPT:
    model = GPT(GPTConfig(**{**SIZES, **changes})).double()
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


def test_forward_equals_the_equations() -> None:
    """GPT-2 written out with explicit loops over heads and positions, independent of the modules."""
    model, batch = build(num_layers=1), tokens(1, 5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.linspace(-0.3, 0.3, parameter.numel(), dtype=torch.float64).view_as(parameter)
            )
    p = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        variance = x.var(-1, unbiased=False, keepdim=True)
        return (x - x.mean(-1, keepdim=True)) / (variance + 1e-5).sqrt() * p[f"{name}.weight"] + p[
            f"{name}.bias"
        ]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    x = p["token_embedding.weight"][batch[0]] + p["position_embedding.weight"][:5]
    inner = norm(x, "blocks.0.attention_norm")
    q, k, v = (linear(inner, f"blocks.0.attention.{part}") for part in ("query", "key", "value"))
    mixed = torch.zeros_like(x)
    for head in range(4):
        part = slice(8 * head, 8 * head + 8)
        for i in range(5):
            weights = torch.softmax(q[i, part] @ k[: i + 1, part].T / 8**0.5, dim=-1)
            mixed[i, part] = weights @ v[: i + 1, part]
    x = x + linear(mixed, "blocks.0.attention.output")
    up = linear(norm(x, "blocks.0.feed_forward_norm"), "blocks.0.feed_forward.up")
    gelu = 0.5 * up * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (up + 0.044715 * up**3)))
    x = x + linear(gelu, "blocks.0.feed_forward.down")
    expected = norm(x, "final_norm") @ p["token_embedding.weight"].T
    torch.testing.assert_close(model(batch)[0].detach(), expected, rtol=1e-11, atol=1e-11)


def test_tied_head_is_one_parameter_even_after_to_empty() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(**SIZES))
    model = model.to_empty(device="cpu")
    assert model.head.weight is model.token_embedding.weight
    assert "head.weight" not in dict(model.named_parameters())
    untied = GPT(GPTConfig(**SIZES, tied_embedding=False))
    assert "head.weight" in dict(untied.named_parameters())


def test_start_is_near_the_uniform_guess() -> None:
    batch = tokens(4, 12)
    loss = F.cross_entropy(build()(batch).flatten(0, 1), batch.roll(1, dims=0).flatten())
    assert loss.item() == pytest.approx(torch.log(torch.tensor(50.0)).item(), abs=0.05)


def test_dropout_drops_in_training_only() -> None:
    model, batch = build(dropout=0.5), tokens(2, 12)
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))
    torch.testing.assert_close(model(batch), build()(batch))


def test_too_long_a_sequence_names_the_limit() -> None:
    with pytest.raises(ValueError, match="13 tokens exceeds max_seq_len=12"):
        build()(tokens(1, 13))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads=5 does not divide dim=32"):
        GPTConfig(**{**SIZES, "num_heads": 5})


def test_logits_keep_the_dtype_of_the_parameters() -> None:
    model = build().to(torch.bfloat16)
    assert model(tokens(1, 4)).dtype == torch.bfloat16
