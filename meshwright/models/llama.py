"""A plain Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases.

Source: Touvron et al. 2023 (arXiv 2302.13971); rotary positions Su et al. 2021 (arXiv 2104.09864); grouped
queries Ainslie et al. 2023 (arXiv 2305.13245). Knows no mesh; head counts are read from the projections'
outputs, so a block also works on the heads one rank holds.
Shape suffixes: B batch, S sequence, D model width, N query heads, K key heads, H width of a head, R = H/2
turned pairs.
Simplifications: no key-value cache; rotary frequencies are not rescaled as in the Llama 3.1 checkpoints.
Pairs are (i, i + H/2), the order of checkpoints in the transformers library.
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
class LlamaConfig:
    """Sizes of a `Llama`."""

    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int
    tied_embedding: bool = False
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        if self.dim % self.num_heads or self.head_dim % 2:
            raise ValueError(
                f"num_heads={self.num_heads} must cut dim={self.dim} into heads of an even width; "
                "use another divisor"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; use a divisor"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads


def rotation_tables(positions_S: Tensor, *, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle each position turns each pair by, float64 `(..., sequence, head_dim / 2)`.

    In float64 because an angle reaches the sequence length: float32 loses 0.01 radian at 131,072 tokens.
    They are computed in each forward pass, never stored: a buffer made on the meta device would lose them.
    """
    exponents_R = torch.arange(0, head_dim, 2, device=positions_S.device, dtype=torch.float64) / head_dim
    angles_SR = positions_S.double()[..., None] * theta**-exponents_R
    return angles_SR.cos(), angles_SR.sin()


def rotate(x_BSNH: Tensor, cosine_SR: Tensor, sine_SR: Tensor) -> Tensor:
    """Turn the pairs (i, i + H/2) of each head by the tables' angles, in the tables' precision."""
    first, second = x_BSNH.to(cosine_SR.dtype).chunk(2, dim=-1)
    cosine, sine = cosine_SR[..., None, :], sine_SR[..., None, :]
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(x_BSNH.dtype)


class GroupedQueryAttention(nn.Module):
    """Causal attention in which several query heads share one key and value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, kv_dim, bias=False)
        self.value = nn.Linear(config.dim, kv_dim, bias=False)
        self.output = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BSD: Tensor, cosine_SR: Tensor, sine_SR: Tensor) -> Tensor:
        """Map `(batch, sequence, dim)` to the same shape; the tables are those of `rotation_tables`."""
        query_BSNH = rotate(self._heads(self.query(x_BSD)), cosine_SR, sine_SR)
        key_BSKH = rotate(self._heads(self.key(x_BSD)), cosine_SR, sine_SR)
        value_BSKH = self._heads(self.value(x_BSD))
        mixed_BNSH = F.scaled_dot_product_attention(
            query_BSNH.transpose(1, 2),
            key_BSKH.transpose(1, 2),
            value_BSKH.transpose(1, 2),
            is_causal=True,
            enable_gqa=query_BSNH.shape[2] != key_BSKH.shape[2],
        )
        return self.output(mixed_BNSH.transpose(1, 2).flatten(2))

    def _heads(self, x_BSD: Tensor) -> Tensor:
        return x_BSD.unflatten(-1, (-1, self.head_dim))


class GatedFeedForward(nn.Module):
    """SwiGLU: the gate's SiLU times the up projection, projected back (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map `(batch, sequence, dim)` to the same shape."""
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each on normalised input and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_epsilon)
        self.attention = GroupedQueryAttention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_epsilon)
        self.feed_forward = GatedFeedForward(config)

    def forward(self, x_BSD: Tensor, cosine_SR: Tensor, sine_SR: Tensor) -> Tensor:
        """Map `(batch, sequence, dim)` to the same shape; the tables are those of `rotation_tables`."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cosine_SR, sine_SR)
        return x_BSD + self.feed_forward(self.feed_forward_norm(x_BSD))


class Llama(nn.Module):
    """A decoder that predicts the next token.

    With `tied_embedding` the head's weight is the token embedding's Parameter itself.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.dim, eps=config.norm_epsilon)
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
        x_BSD = self.token_embedding(tokens)
        cosine_SR, sine_SR = (
            table.to(torch.promote_types(x_BSD.dtype, torch.float32))
            for table in rotation_tables(
                positions,
                head_dim=self.config.head_dim,
                theta=self.config.rope_theta,
            )
        )
        for block in self.blocks:
            x_BSD = block(x_BSD, cosine_SR, sine_SR)
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
        """Normal 0.02, projections into the residual stream 0.02 / sqrt(2 * num_layers), norms one."""
        residual = Initial("normal", 0.02 / math.sqrt(2 * self.config.num_layers))
        values = {}
        for name, _ in self.named_parameters():
            if name.endswith("norm.weight"):
                values[name] = Initial("ones")
            elif name.endswith((".output.weight", ".down.weight")):
                values[name] = residual
            else:
                values[name] = Initial("normal", 0.02)
        return values
