"""What a rank takes for blocks, heads and attention of given shapes: our own modules in plain torch, timed.

Owns the modules with a rank's share of heads and channels. Processor seconds; see `measuring.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.comm.log import CommLog
from meshwright.comm.ops import Group
from meshwright.context.attend import attend
from meshwright.context.blocks import Attention, positions_of
from meshwright.context.masks import AttentionMask
from meshwright.layout.sequence import cut_sequence
from meshwright.models.gpt import GPTBlock, GPTConfig
from meshwright.models.llama import LlamaBlock, LlamaConfig, rotation_tables
from meshwright.models.loss import summed_cross_entropy
from meshwright.presets.host import BlockTime, PartTime
from meshwright.simulation.host_keys import AttendShape, BlockShape, HeadShape

_SHORTEST_SECONDS = 0.02
_REPEATS = 5
_SWEPT_NUMEL = 1 << 21


def seconds_of(call: Callable[[], object]) -> float:
    """Median processor seconds of one call, over repeats of as many calls as a clock can tell."""
    call()
    start = time.process_time()
    call()
    count = max(1, int(_SHORTEST_SECONDS / max(time.process_time() - start, 1e-7)))
    found = []
    for _ in range(_REPEATS):
        start = time.process_time()
        for _ in range(count):
            call()
        found.append((time.process_time() - start) / count)
    return statistics.median(found)


def seconds_between(
    call: Callable[[], object], between: Callable[[], object], *, in_a_group: int = 4
) -> float:
    """Processor seconds of one call after `between`, which is not counted: the median of means of a few calls.

    In a step, collectives and all that Python does find their memory and code out of the caches, and other ranks a
    little late: calls in a row take a half to a quarter of the time. Ranks that wait for each other in the call all
    make as many.
    """
    found = []
    for _ in range(_REPEATS):
        spent = 0.0
        for _ in range(in_a_group):
            between()
            start = time.process_time()
            call()
            spent += time.process_time() - start
        found.append(spent / in_a_group)
    return statistics.median(found)


def as_a_step(*tensors: Tensor) -> Callable[[], None]:
    """Some milliseconds of products, more memory than a core's own caches hold, and last `tensors`, are written."""
    left, others = torch.ones(512, 512), torch.zeros(_SWEPT_NUMEL)

    def between() -> None:
        left @ left
        for tensor in (others, *tensors):
            tensor.add_(1.0)

    return between


# Blocks.


def make_block(shape: BlockShape) -> nn.Module:
    """A block with this rank's share of heads and channels."""
    sizes: dict[str, Any] = {
        "num_layers": 1,
        "dim": shape.dim,
        "num_heads": shape.dim // shape.head_dim,
        "ffn_dim": shape.ffn,
        "vocab_size": 8,
        "max_seq_len": shape.seq_len,
    }
    block: Any
    if shape.family == "gpt":
        block = GPTBlock(GPTConfig(**sizes))
    else:
        block = LlamaBlock(LlamaConfig(**sizes, num_kv_heads=shape.kv_heads, rope_theta=1e4))
    own, bias = shape.heads * shape.head_dim, shape.family == "gpt"
    attention = block.attention
    attention.query = nn.Linear(shape.dim, own, bias=bias)
    attention.key = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=bias)
    attention.value = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=bias)
    attention.output = nn.Linear(own, shape.dim, bias=bias)
    return block


def block_time(shape: BlockShape, micro: int) -> BlockTime:
    """A block on `micro` sequences."""
    block = make_block(shape)
    x = torch.randn(micro, shape.seq_len, shape.dim, requires_grad=True)
    tables: tuple[Tensor, ...] = ()
    if shape.family != "gpt":
        tables = rotation_tables(torch.arange(shape.seq_len), head_dim=shape.head_dim, theta=1e4)
    grad = torch.randn(micro, shape.seq_len, shape.dim)

    def forward() -> Tensor:
        return block(x, *tables)

    def both() -> None:
        block.zero_grad()
        forward().backward(grad)

    first, whole = seconds_of(forward), seconds_of(both)
    block.requires_grad_(False)
    without = seconds_of(both)
    core, core_both = _core_seconds(shape, micro)
    inputs, weights = max(without - first, 0.0), max(whole - without, 0.0)
    return BlockTime(shape.key, micro, first, inputs, weights, core, max(core_both - core, 0.0))


def _core_seconds(shape: BlockShape, micro: int) -> tuple[float, float]:
    """Attention alone: forward, and forward with backward."""
    query, key, value = (
        torch.randn(micro, heads, shape.seq_len, shape.head_dim, requires_grad=True)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )

    def forward() -> Tensor:
        grouped = shape.heads != shape.kv_heads
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

    grad = torch.randn(query.shape)
    return seconds_of(forward), seconds_of(lambda: forward().backward(grad))


def head_time(shape: HeadShape, micro: int) -> PartTime:
    """Embedding, norm, projection and loss of `micro` sequences."""
    embedding, head = nn.Embedding(shape.vocab, shape.dim), nn.Linear(shape.dim, shape.vocab, bias=False)
    norm = nn.LayerNorm(shape.dim)
    tokens = torch.randint(0, shape.vocab, (micro, shape.seq_len))

    def forward() -> Tensor:
        return summed_cross_entropy(head(norm(embedding(tokens))), tokens)[0]

    first, whole = seconds_of(forward), seconds_of(lambda: forward().backward())
    return PartTime(shape.key, micro, first, max(whole - first, 0.0))


class _Silent:
    """Transport of a group that sends nothing: what arrives is what memory happens to hold."""

    name = "none"

    def _nothing(self, *_: Any, **__: Any) -> _Silent:
        return self

    send = receive = all_gather = reduce_scatter = all_to_all = _nothing

    def wait(self) -> None:
        """At once."""


def attend_time(shape: AttendShape, micro: int) -> PartTime:
    """What one rank computes of attention over a cut sequence; nothing is sent."""
    ranks = tuple(range(shape.ranks))
    silent: Any = _Silent()
    group = Group("cp", ranks, 0, silent, CommLog())
    cut = cut_sequence(shape.seq_len, shape.ranks, shape.kind)
    here = len(positions_of(cut.runs(0), torch.device("cpu")))
    query, key, value = (
        torch.randn(micro, heads, here, shape.head_dim, requires_grad=True)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    call = Attention(AttentionMask(is_causal=True), shape.seq_len, shape.head_dim**-0.5)

    def forward() -> Tensor:
        return attend(query, key, value, call=call, cut=cut, group=group, kind=shape.kind)

    grad = torch.randn(micro, shape.heads, here, shape.head_dim)
    first, whole = seconds_of(forward), seconds_of(lambda: forward().backward(grad))
    return PartTime(shape.key, micro, first, max(whole - first, 0.0))
