"""Attention of one block of queries and keys with its log-sum-exp, and the backward of such a block from the final one.

Owns the choice of kernel. Must not know positions, ranks or how blocks are put together.

| kernel | where | what it takes |
|---|---|---|
| `FLASH` | CPU | torch's fused attention (`aten._scaled_dot_product_flash_attention_for_cpu`), value as wide as query |
| `WRITTEN_OUT` | any device | the products and the softmax as such; also with dropout on the weights |

The operator is torch's private one: no public function of torch gives a log-sum-exp that has a backward on CPUs. A test
holds its schema, and its values against the written-out kernel.

[Note: log-sum-exp] With weights exp(score - lse), whose lse is that of all blocks together, each block's gradients are
exact by themselves: the sum of weight x its gradient over all keys is output · its gradient (Dao et al. 2022,
FlashAttention, appendix B.4). A query without any key gets output 0 and lse -inf; the fused operator gives lse 0 there.

Simplification: on GPUs the written-out kernel runs.
Shape suffixes: B batch, N query heads, K key heads, S queries, T keys, E width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True, eq=False)
class Block:
    """What a kernel must know besides its tensors.

    Attributes:
        scale: of the scores.
        is_causal: query s attends to keys 0 .. s; then there are as many keys as queries.
        visible: bool `(batch or 1, 1, queries, keys)`, or None: everything.
        keep: multiplies the weights in the output, `(batch, heads, queries, keys)`: dropout with its scale; or None.
    """

    scale: float
    is_causal: bool = False
    visible: Tensor | None = None
    keep: Tensor | None = None


class Kernel(Protocol):
    """Attention of one block. Keys and values may have fewer heads, each for a group of neighbouring query heads."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """(output `(B, N, S, E)`, log-sum-exp of each query's scores `(B, N, S)`, -inf where it sees no key)."""
        ...

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], final: tuple[Tensor, Tensor], block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of (query, key, value) that this block adds; `final` is (output, log-sum-exp) of all blocks."""
        ...


def choose_kernel(query: Tensor, value: Tensor, *, has_dropout: bool) -> Kernel:
    """The fastest kernel that takes these tensors."""
    fused = query.device.type == "cpu" and query.shape[-1] == value.shape[-1] and not has_dropout
    return FLASH if fused else WRITTEN_OUT


class _Flash:
    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        out, lse = _FLASH(
            query, key, value, 0.0, block.is_causal, attn_mask=_additive(block, query), scale=block.scale
        )
        if block.visible is not None:
            lse = lse.masked_fill(~block.visible.any(-1), -torch.inf)
        return out, lse

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], final: tuple[Tensor, Tensor], block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        out, lse = final
        mask = _additive(block, inputs[0])
        return _FLASH_BACKWARD(
            grad, *inputs, out, lse, 0.0, block.is_causal, attn_mask=mask, scale=block.scale
        )


def _additive(block: Block, like: Tensor) -> Tensor | None:
    """The mask as the fused operator takes it."""
    if block.visible is None:
        return None
    zeros = torch.zeros((), dtype=like.dtype, device=like.device)
    return torch.where(block.visible, zeros, -torch.inf)


class _WrittenOut:
    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        scores = _scores(query, key, block)
        lse = scores.logsumexp(-1)
        weights = (scores - _finite(lse)[..., None]).exp_()
        if block.keep is not None:
            weights *= block.keep
        return (weights @ _repeated(value, query).to(weights.dtype)).to(query.dtype), lse

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], final: tuple[Tensor, Tensor], block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        query, key, value = inputs
        out, lse = final
        weights = (_scores(query, key, block) - lse[..., None]).exp_()
        grad, out = grad.to(weights.dtype), out.to(weights.dtype)
        kept = weights if block.keep is None else weights * block.keep
        grad_value = kept.mT @ grad
        grad_weights = grad @ _repeated(value, query).to(weights.dtype).mT
        if block.keep is not None:
            grad_weights *= block.keep
        grad_scores = (grad_weights - (grad * out).sum(-1, keepdim=True)) * weights * block.scale
        grad_query = grad_scores @ _repeated(key, query).to(weights.dtype)
        grad_key = grad_scores.mT @ query.to(weights.dtype)
        return (
            grad_query.to(query.dtype),
            _summed(grad_key, key).to(key.dtype),
            _summed(grad_value, value).to(value.dtype),
        )


FLASH: Kernel = _Flash()
WRITTEN_OUT: Kernel = _WrittenOut()


def _scores(query: Tensor, key: Tensor, block: Block) -> Tensor:
    """Scores `(B, N, S, T)` in at least float32, -inf where a query does not see a key."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(dtype) * block.scale) @ _repeated(key, query).to(dtype).mT
    if block.is_causal:
        numbers = torch.arange(scores.shape[-1], device=scores.device)
        scores.masked_fill_(numbers > numbers[:, None], -torch.inf)
    if block.visible is not None:
        scores.masked_fill_(~block.visible, -torch.inf)
    return scores


def _finite(lse: Tensor) -> Tensor:
    """0 for queries that see no key: their scores stay -inf, and their weights become 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _repeated(x_BKTE: Tensor, query: Tensor) -> Tensor:
    group = query.shape[1] // x_BKTE.shape[1]
    return x_BKTE if group == 1 else x_BKTE.repeat_interleave(group, dim=1)


def _summed(grad_BNTE: Tensor, x_BKTE: Tensor) -> Tensor:
    heads = x_BKTE.shape[1]
    return grad_BNTE if grad_BNTE.shape[1] == heads else grad_BNTE.unflatten(1, (heads, -1)).sum(2)
