"""Models as people write them: attention with heads as a constant, fused projections, tied heads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, SEQUENCE, DIM, HEADS, FFN = 101, 7, 24, 6, 50


class FusedAttention(nn.Module):
    """One projection for queries, keys and values; the number of heads is a constant of the module's code."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(DIM, 3 * DIM)
        self.c_proj = nn.Linear(DIM, DIM)
        self.attn_dropout = nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64))[None, None])

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.size()
        q, k, v = (
            part.view(batch, length, HEADS, dim // HEADS).transpose(1, 2)
            for part in self.c_attn(x).split(dim, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        y = self.attn_dropout(scores.softmax(-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, dim))


class FusedGate(nn.Module):
    """Gate and up as one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(DIM, 2 * FFN, bias=False), nn.Linear(FFN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class NanoBlock(nn.Module):
    def __init__(self, dropout: float, gated: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = FusedAttention(dropout)
        plain = [nn.Linear(DIM, FFN), nn.GELU(), nn.Linear(FFN, DIM), nn.Dropout(dropout)]
        self.mlp = FusedGate() if gated else nn.Sequential(*plain)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Nano(nn.Module):
    """A GPT of a blog post: learned positions, a tied head."""

    def __init__(self, dropout: float = 0.0, *, gated: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, DIM), nn.Embedding(16, DIM)
        self.h = nn.ModuleList(NanoBlock(dropout, gated) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Layers(nn.Module):
    """Unequal layers over tokens, without norms, and a class for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 12)
        widths = (12, 30, 22, 41, 10, VOCABULARY)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


def _hf(build: Callable[[], nn.Module]) -> nn.Module:
    from transformers.utils import logging

    logging.set_verbosity_error()
    return build()


def make_gpt2(dropout: float = 0.0) -> nn.Module:
    """Of transformers: weights (inputs, outputs), one fused projection."""
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    sizes = {"n_positions": 16, "n_embd": DIM, "n_layer": 2, "n_head": HEADS, "n_inner": FFN}
    return _hf(lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, use_cache=False, **sizes, **rates)))


def make_bert() -> nn.Module:
    """An encoder with learned positions and token types, and a tied decoder with a bias."""
    from transformers import BertConfig, BertForMaskedLM

    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {
        "hidden_size": DIM,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "intermediate_size": FFN,
    }
    return _hf(
        lambda: BertForMaskedLM(
            BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes, **rates)
        )
    )


def make_t5() -> nn.Module:
    """Encoder and decoder, whose blocks share one table of relative positions by heads."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": DIM, "d_kv": 4, "d_ff": FFN, "num_layers": 2, "num_heads": HEADS}
    return _hf(
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
        )
    )


def make_hf_llama(kind: str = "Llama", **sizes: int) -> nn.Module:
    """Llama or a relative of it, with two key/value heads."""
    import transformers

    config, model = (getattr(transformers, kind + suffix) for suffix in ("Config", "ForCausalLM"))
    given = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
    }
    return _hf(lambda: model(config(**given | sizes, use_cache=False, pad_token_id=0)))


def loss_of_logits(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of our kind of model and of those of transformers; an encoder-decoder reads its labels too."""
    if hasattr(model, "decoder") and hasattr(model, "encoder"):
        logits = model(input_ids=batch["tokens"], decoder_input_ids=batch["tokens"].flip(1)).logits
    else:
        logits = model(batch["tokens"])
        logits = logits if isinstance(logits, Tensor) else logits.logits
    total = F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (batch["labels"] != -100).sum()
