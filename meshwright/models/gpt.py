"""A plain GPT-2: learned positions, pre-normalisation, GELU, biases (Radford et al. 2019).

Knows no mesh: it runs on one device, and every parallelism meets it from outside. Head counts are read from
the projections' outputs, so a block also works on the heads one rank holds.
Shape suffixes: B batch, S sequence, D model width, N heads, H width of a head.
Simplification: no key-value cache, this model is for training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.models.initial import Initial


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a `GPT`; `dropout` is the probability of dropping, everywhere the paper drops."""

    num_layers: int
    dim: int
    num_heads: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int
    tied_embedding: bool = True
    norm_epsilon: float = 1e-5
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} does not divide dim={self.dim}; use a divisor")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads


class CausalSelfAttention(nn.Module):
    """Multi-head attention to earlier positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        self.query = nn.Linear(config.dim, config.dim)
        self.key = nn.Linear(config.dim, config.dim)
        self.value = nn.Linear(config.dim, config.dim)
        self.output = nn.Linear(config.dim, config.dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map `(batch, sequence, dim)` to the same shape."""
        query_BNSH = self._heads(self.query(x_BSD))
        key_BNSH = self._heads(self.key(x_BSD))
        value_BNSH = self._heads(self.value(x_BSD))
        dropout = self.dropout if self.training else 0.0
        mixed_BNSH = F.scaled_dot_product_attention(
            query_BNSH, key_BNSH, value_BNSH, dropout_p=dropout, is_causal=True
        )
        return self.output(mixed_BNSH.transpose(1, 2).flatten(2))

    def _heads(self, x_BSD: Tensor) -> Tensor:
        return x_BSD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear maps around a GELU (tanh form, as GPT-2)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.ffn_dim)
        self.down = nn.Linear(config.ffn_dim, config.dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map `(batch, sequence, dim)` to the same shape."""
        return self.down(F.gelu(self.up(x_BSD), approximate="tanh"))


class GPTBlock(nn.Module):
    """Attention and feed-forward, each on normalised input and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, eps=config.norm_epsilon)
        self.attention = CausalSelfAttention(config)
        self.feed_forward_norm = nn.LayerNorm(config.dim, eps=config.norm_epsilon)
        self.feed_forward = FeedForward(config)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map `(batch, sequence, dim)` to the same shape."""
        x_BSD = x_BSD + self.residual_dropout(self.attention(self.attention_norm(x_BSD)))
        return x_BSD + self.residual_dropout(self.feed_forward(self.feed_forward_norm(x_BSD)))


class GPT(nn.Module):
    """A decoder that predicts the next token.

    With `tied_embedding` the head's weight is the token embedding's Parameter itself.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.dim)
        self.position_embedding = nn.Embedding(config.max_seq_len, config.dim)
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.dim, eps=config.norm_epsilon)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self._tie()

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map tokens int64 `(batch, sequence)` to logits `(batch, sequence, vocab_size)`.

        Args:
            tokens: ids.
            positions: of the tokens, of the same shape or of one sequence, for a part of a longer one; None: 0, 1 ...

        Raises:
            ValueError: the sequence is longer than `max_seq_len`.
        """
        seq_len = tokens.shape[1]
        if seq_len > self.config.max_seq_len:
            raise ValueError(
                f"sequence of {seq_len} tokens exceeds max_seq_len={self.config.max_seq_len}; "
                "cut it, or build the model with more positions"
            )
        if positions is None:
            positions = torch.arange(seq_len, device=tokens.device)
        x_BSD = self.embedding_dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(self.final_norm(x_BSD))

    def to_empty(self, *, device: str | torch.device | int | None, recurse: bool = True) -> Self:
        """As `nn.Module.to_empty`, but a tied head stays tied: torch allocates the weight once per module."""
        super().to_empty(device=device, recurse=recurse)
        self._tie()
        return self

    def _tie(self) -> None:
        if self.config.tied_embedding:
            self.head.weight = self.token_embedding.weight

    def initial_values(self) -> dict[str, Initial]:
        """GPT-2's start: normal 0.02, projections into the residual stream 0.02 / sqrt(2 * num_layers)."""
        residual = Initial("normal", 0.02 / math.sqrt(2 * self.config.num_layers))
        values = {}
        for name, _ in self.named_parameters():
            if name.endswith(".bias"):
                values[name] = Initial("zeros")
            elif name.endswith("norm.weight"):
                values[name] = Initial("ones")
            elif name.endswith((".output.weight", ".down.weight")):
                values[name] = residual
            else:
                values[name] = Initial("normal", 0.02)
        return values
