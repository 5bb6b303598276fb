"""What runs instead of a layer's forward where its matrix is cut over tensor-parallel ranks.

Owns one call for each role, and the input that sibling projections share. Products are those of `tensor/`; which layer
has which role is decided in `tensor_parallel.py`.

[Note: one sum for several projections] Query, key and value read one tensor. Each of them is a module of its own, so
the first that sees a tensor makes the copy whose gradient is summed over the group, and its siblings take the same one:
autograd adds up their gradients before the one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.adapt.cut_logits import CutLogits
from meshwright.adapt.sequence_parallel import TokenCut
from meshwright.comm import autograd
from meshwright.comm.ops import Group
from meshwright.layout.tensor_layout import CutRegion
from meshwright.tensor import linear, vocabulary

# How a pair gets its tokens: "whole" where the module around it has gathered them, None without sequence parallelism.
Tokens = TokenCut | Literal["whole"] | None


@dataclass(frozen=True)
class CutEntry:
    """What a region between a column and a row split has of its heads and channels; see `CutRegion`."""

    region: CutRegion
    heads: tuple[int, int, int] | None
    channels: tuple[int, int, int]

    def enter(self) -> None:
        """A column split runs."""
        self.region.heads, self.region.channels = self.heads, self.channels


@dataclass
class SharedInput:
    """The input of sibling projections and its copy; see [Note: one sum for several projections]."""

    num_users: int
    cut: CutEntry
    tokens: Tokens = None
    source: Tensor | None = None
    copied: Tensor | None = None
    left: int = 0

    def of(self, x: Tensor, group: Group, cause: str) -> Tensor:
        """The one copy of x for all siblings; what follows is a part, up to the row split."""
        self.cut.enter()
        if self.tokens == "whole" or (
            self.tokens is None and not (x.requires_grad and torch.is_grad_enabled())
        ):
            return x
        if x is not self.source or self.copied is None:
            made = (
                autograd.copy(x, group, cause=cause) if self.tokens is None else self.tokens.gather(x, cause)
            )
            self.source, self.copied, self.left = x, made, self.num_users
        copied = self.copied
        self.left -= 1
        if not self.left:
            self.source = self.copied = None
        return copied


def column(module: nn.Linear, shared: SharedInput, group: Group, cause: str, x: Tensor) -> Tensor:
    """Outputs that stay cut."""
    return F.linear(shared.of(x, group, cause), module.weight, module.bias)


def repeated(
    module: nn.Linear, shared: SharedInput, group: Group, rows: Tensor, cause: str, x: Tensor
) -> Tensor:
    """Rows of a whole weight, one key/value head for each of this rank's query heads."""
    rows = rows.to(x.device)
    weight = autograd.copy(module.weight, group, cause=cause)[rows]
    bias = None if module.bias is None else autograd.copy(module.bias, group, cause=cause)[rows]
    return F.linear(shared.of(x, group, cause), weight, bias)


def row(
    module: nn.Linear, region: CutRegion, group: Group, tokens: TokenCut | None, cause: str, x: Tensor
) -> Tensor:
    """Whole outputs of a part of the inputs, of all tokens or of this rank's."""
    region.leave()
    return _row(x, module.weight, module.bias, group, tokens=tokens, cause=cause)


def _row(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, *, tokens: TokenCut | None, cause: str
) -> Tensor:
    if tokens is None:
        return linear.row(x, weight, bias, group, cause=cause)
    y = tokens.scatter(F.linear(x, weight), cause)
    return y if bias is None else y + bias


def summed(module: nn.Linear, group: Group, sizes: Sequence[int], cause: str, x: Tensor) -> Tensor:
    """Whole outputs of a whole input, of which this rank multiplies a part."""
    return linear.naive_row(x, module.weight, module.bias, group, sizes=sizes, cause=cause)


def transposed_column(module: Any, shared: SharedInput, group: Group, cause: str, x: Tensor) -> Tensor:
    """As `column`, of a weight (inputs, outputs)."""
    return F.linear(shared.of(x, group, cause), module.weight.t(), module.bias)


def transposed_row(
    module: Any, region: CutRegion, group: Group, tokens: TokenCut | None, cause: str, x: Tensor
) -> Tensor:
    """As `row`, of a weight (inputs, outputs)."""
    region.leave()
    return _row(x, module.weight.t(), module.bias, group, tokens=tokens, cause=cause)


def embedding(module: nn.Embedding, group: Group, first: int, cause: str, tokens: Tensor) -> Tensor:
    """Rows of a table that is cut by rows."""
    padding = module.padding_idx
    weight = module.weight
    if padding is not None and first <= padding < first + weight.shape[0]:
        # The padding's row gets no gradient, as in one table.
        weight = torch.where(
            (torch.arange(weight.shape[0], device=weight.device) == padding - first)[:, None],
            weight.detach(),
            weight,
        )
    return vocabulary.embedding(tokens, weight, group, first=first, cause=cause)


def gathered(
    module: nn.Linear, group: Group, sizes: Sequence[int], tokens: TokenCut | None, cause: str, x: Tensor
) -> Tensor:
    """Outputs that a cross-entropy takes as they are cut, and everything else gathers."""
    x = autograd.copy(x, group, cause=cause) if tokens is None else tokens.gather(x, cause, last=True)
    return CutLogits.of(F.linear(x, module.weight, module.bias), group, sizes, cause=cause)


@dataclass(frozen=True, eq=False)
class Between:
    """A module, and which of its own parameters meet a part of its tensors."""

    module: nn.Module
    names: tuple[str, ...]
    forward: Callable[..., Any]


def between(what: Between, group: Group, cause: str, *args: Any, **kwargs: Any) -> Any:
    """A module's own forward, in which parameters are copies whose gradients are summed over the ranks."""
    module, own = what.module, what.module._parameters
    copies = dict(own)
    for name in what.names:
        parameter = own[name]
        if parameter is not None and parameter.requires_grad and torch.is_grad_enabled():
            copies[name] = cast(nn.Parameter, autograd.copy(parameter, group, cause=cause))
    # Its code reads them by name; the module keeps its parameters.
    vars(module)["_parameters"] = copies
    try:
        return what.forward(*args, **kwargs)
    finally:
        vars(module)["_parameters"] = own
