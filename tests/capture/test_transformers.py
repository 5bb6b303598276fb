"""Models of transformers, unmodified: the attention that is captured is the one that runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.capture.attention_masks import masks_as_in_training
from meshwright.capture.capture import capture
from meshwright.capture.run import run_graph
from meshwright.errors import ConfigError
from meshwright.graph.repeats import find_blocks
from meshwright.models.hf_loss import causal_lm_loss
from tests.capture.checking import assert_runs_as_module, counted, kept_by_autograd

transformers = pytest.importorskip("transformers")
SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama(**changes: object) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS, **changes)).double()


def text(batch: int, sequence: int, *names: str) -> dict[str, Tensor]:
    tokens = torch.arange(batch * sequence).view(batch, sequence) % 64
    return {"input_ids": tokens, **{name: torch.ones_like(tokens) for name in names}}


def masks_of(graph) -> list[bool]:
    """For each call of attention, whether it gets a mask."""
    calls = [task for task in graph.tasks if task.op.startswith("aten.scaled_dot_product_attention")]
    return [len(task.arguments) > 3 and task.arguments[3] is not None for task in calls]


def test_a_causal_model_is_captured_as_it_runs():
    model = llama()
    graph = capture(model, causal_lm_loss, text(3, 12))
    assert graph.free == ("batch", "sequence")
    assert masks_of(graph) == [False] * 3
    scores = 3 * 4 * 32
    assert dict(graph.flops().terms)[1, 2] == scores
    assert dict(graph.causal_flops().terms)[1, 2] == scores / 2
    layers = [block for block in find_blocks(graph) if block.count > 1]
    assert [(block.count, block.path) for block in layers] == [(3, "model.layers.0")]
    assert_runs_as_module(graph, model, causal_lm_loss, text(2, 17))
    assert counted(model, causal_lm_loss, text(2, 17))[0] == graph.flops()(2, 17)
    assert kept_by_autograd(model, causal_lm_loss, text(2, 17)) == graph.saved_bytes()(2, 17)


@pytest.mark.parity
def test_padding_that_a_batch_brings_stays_a_mask():
    batch = text(3, 12, "attention_mask")
    batch["attention_mask"][0, 9:] = 0
    model = llama()
    graph = capture(model, causal_lm_loss, batch)
    assert masks_of(graph) == [True] * 3
    assert_runs_as_module(graph, model, causal_lm_loss, batch)


def test_the_registry_of_masks_is_as_before():
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as REGISTRY

    before, mine = REGISTRY["sdpa"], lambda *args, **kwargs: None
    with masks_as_in_training({}):
        assert REGISTRY["sdpa"] is not before
    assert REGISTRY["sdpa"] is before
    with masks_as_in_training({"position_ids": torch.ones(1)}):
        assert REGISTRY["sdpa"] is before
    REGISTRY["sdpa"] = mine
    try:
        with pytest.raises(KeyError), masks_as_in_training({}):
            raise KeyError
        assert REGISTRY["sdpa"] is mine
    finally:
        del REGISTRY["sdpa"]
    assert REGISTRY["sdpa"] is before


@pytest.mark.parity
def test_a_window_that_hides_something_is_a_mask():
    sizes = {**SIZES, **HEADS, "sliding_window": 8, "vocab_size": 64}
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes)).double()
    graph = capture(model, causal_lm_loss, text(3, 12))
    assert masks_of(graph) == [True] * 3
    assert_runs_as_module(graph, model, causal_lm_loss, text(3, 12))
    assert masks_of(capture(model, causal_lm_loss, text(3, 6))) == [False] * 3
    with pytest.raises(ConfigError, match=r"E134 .*sequence = 6: its code takes another branch outside of 8"):
        run_graph(graph, model, text(3, 6))
