"""The same model read from an ONNX file and from its module: the same costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshwright.capture.capture import capture
from meshwright.graph.formula import BATCH, SEQUENCE
from meshwright.graph.onnx_file import read_onnx
from meshwright.models import GPT, MLP, GPTConfig, MLPConfig
from meshwright.models.hf_loss import causal_lm_loss
from meshwright.models.loss import classification_loss, language_model_loss
from tests.capture.pictures import ResNet, classified, pictures

DATA = Path(__file__).parents[1] / "graph" / "data"


def tokens(name: str) -> dict[str, Tensor]:
    x = torch.zeros(3, 17, dtype=torch.long)
    return {name: x, "labels": x}


def gpt() -> nn.Module:
    sizes = {"num_layers": 3, "dim": 32, "num_heads": 4, "ffn_dim": 128, "vocab_size": 96, "max_seq_len": 64}
    return GPT(GPTConfig(**sizes))


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 172, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def mlp() -> nn.Module:
    return MLP(MLPConfig(num_layers=2, dim=16, input_dim=8, num_classes=4))


CASES = {
    "mlp": (
        mlp,
        classification_loss,
        {"inputs": torch.zeros(3, 8), "labels": torch.zeros(3, dtype=torch.long)},
    ),
    "gpt": (gpt, language_model_loss, tokens("tokens")),
    "llama": (llama, causal_lm_loss, tokens("input_ids")),
    "resnet": (lambda: ResNet(width=8), classified, pictures(3, 32)),
}


LONG = ("llama", "resnet")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.parity] if name in LONG else []) for name in CASES]
)
def test_costs_are_those_of_the_module(name):
    make, loss, batch = CASES[name]
    file, graph = read_onnx(DATA / f"{name}.onnx"), capture(make(), loss, batch)
    assert file.free == graph.free
    assert file.flops() == graph.flops()
    scores = graph.causal_flops() - graph.flops()
    if not scores.terms:  # without attention: the kernel of attention computes its scores again
        assert file.backward_flops() == graph.backward_flops()
    # Scale factors and folded statistics are initialisers too.
    assert file.num_parameters() == pytest.approx(graph.num_parameters(), rel=0.07)


def test_the_kernel_of_attention_computes_its_scores_once_more():
    file, graph = read_onnx(DATA / "gpt.onnx"), capture(gpt(), language_model_loss, tokens("tokens"))
    scores = 3 * 2 * 32 * BATCH * SEQUENCE * SEQUENCE
    assert graph.backward_flops() - file.backward_flops() == scores
