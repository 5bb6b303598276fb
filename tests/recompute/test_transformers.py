"""Models of transformers, unmodified: the same gradients to the bit; key and value caches are off meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.layout.recompute import parse_recompute
from meshwright.recompute.install import install

transformers = pytest.importorskip("transformers")

SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "vocab_size": 50, "num_attention_heads": 4}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=2),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, intermediate_size=48, num_key_value_heads=2, num_local_experts=4
    ),
    "bert": lambda: transformers.BertConfig(**SIZES, intermediate_size=64),
}
CASES = [
    ("llama", "eager", "constant"),
    ("llama", "sdpa", "every:2"),
    pytest.param("llama", "eager", "selective", marks=pytest.mark.parity),
    pytest.param("mixtral", "sdpa", "full", marks=pytest.mark.parity),
    pytest.param("bert", "eager", "selective", marks=pytest.mark.parity),
    pytest.param("bert", "sdpa", "full", marks=pytest.mark.parity),
]


def gradients(model: torch.nn.Module, tokens: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("name", "attention", "word"), CASES)
def test_gradients_are_the_same_to_the_bit(name: str, attention: str, word: str) -> None:
    torch.manual_seed(0)
    config = MODELS[name]()
    kind = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation=attention).train()
    tokens = torch.randint(50, (2, 9))
    caches = getattr(model.config, "use_cache", False)
    expected = gradients(model, tokens)
    installed = install(model, parse_recompute(word))
    assert not getattr(model.config, "use_cache", False)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, tokens), expected, strict=True))
    assert word == "selective" or sum(installed.recomputers[0].reruns.values()) >= 3
    installed.undo()
    assert getattr(model.config, "use_cache", False) == caches
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, tokens), expected, strict=True))
