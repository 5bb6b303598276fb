"""Which parts of a model a layout runs on a rank of this host: the names under which they are measured.

Owns the names and what they mean, for whoever measures and whoever prices.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.presets.models import ModelPreset
from meshwright.simulation.job import ContextKind, Layout, Workload


@dataclass(frozen=True)
class BlockShape:
    """A block as one rank runs it.

    Attributes:
        family: of the model.
        dim: width of the stream.
        heads, kv_heads: of this rank.
        head_dim: width of a head.
        ffn: width of this rank's feed-forward part.
        seq_len: tokens of a sequence on this rank.
    """

    family: str
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    seq_len: int

    @property
    def key(self) -> str:
        """Its name."""
        return (
            f"block {self.family} dim={self.dim} heads={self.heads}/{self.kv_heads}x{self.head_dim} "
            f"ffn={self.ffn} seq={self.seq_len}"
        )


@dataclass(frozen=True)
class HeadShape:
    """Embedding, output projection and loss. Attributes: width, vocabulary of this rank, tokens of a sequence."""

    dim: int
    vocab: int
    seq_len: int

    @property
    def key(self) -> str:
        """Its name."""
        return f"head dim={self.dim} vocab={self.vocab} seq={self.seq_len}"


@dataclass(frozen=True)
class AttendShape:
    """Attention over a cut sequence. Attributes: kind; ranks; heads of this rank before the cut; the whole length."""

    kind: ContextKind
    ranks: int
    heads: int
    kv_heads: int
    head_dim: int
    seq_len: int

    @property
    def key(self) -> str:
        """Its name."""
        return (
            f"attend {self.kind} cp={self.ranks} heads={self.heads}/{self.kv_heads}x{self.head_dim} "
            f"seq={self.seq_len}"
        )


def block_of(work: Workload, layout: Layout) -> BlockShape:
    """The block of a rank."""
    model, t = work.model, layout.tp
    return BlockShape(
        model.family,
        model.dim,
        model.num_heads // t,
        max(1, model.num_kv_heads // t),
        model.head_dim,
        model.ffn_dim // t,
        work.seq_len // layout.cp,
    )


def head_of(work: Workload, layout: Layout) -> HeadShape:
    """The head of a rank."""
    return HeadShape(work.model.dim, -(-work.model.vocab_size // layout.tp), work.seq_len // layout.cp)


def attend_of(work: Workload, layout: Layout) -> AttendShape | None:
    """Attention under cp; None without."""
    if layout.cp == 1:
        return None
    block = block_of(work, layout)
    return AttendShape(layout.cp_kind, layout.cp, block.heads, block.kv_heads, block.head_dim, work.seq_len)


def is_known(model: ModelPreset) -> bool:
    """Whether blocks of this family are measured."""
    return model.family in ("gpt", "llama")
