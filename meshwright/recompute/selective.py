"""Attention keeps queries, keys and values; scores, weights and masks that it makes of them are made again in backward.

Two forms are found in any model, by watching torch's functions while a module's forward runs: the fused function, where
it keeps much more than it is given and returns (as without a fused kernel); and attention written out: a product of two
activations, then scaled, masked, turned into weights by softmax, dropped out, up to the product with the values. The
steps of the second form are noted, and the first tensor that backward opens makes all of them run again. What autograd
keeps meanwhile: [Note: holders] in `holders.py`.

Source: Korthikanti et al., Reducing activation recomputation in large transformer models, 2022 (arXiv 2205.05198),
section 5.

Limits: attention by other functions (einsum of a custom kernel, a module of compiled code) keeps what it keeps; give
its module a pattern of its own.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshwright.nested import storage_key, tensors_in
from meshwright.recompute.forwards import replace_forwards
from meshwright.recompute.holders import Arguments, Holder, Weights, replay
from meshwright.recompute.regions import Region, Step, checkpoint_in_force

_PRODUCTS = frozenset({"matmul", "bmm", "__matmul__", "einsum", "baddbmm"})
# What attention does to its scores and weights, by the names of torch's functions.
_STEPS = re.compile(
    r"softmax|dropout|masked_fill_?|where|add_?|sub|mul_?|div_?|true_divide|tanh|clamp"
    r"|__(add|radd|iadd|sub|mul|rmul|imul|truediv|itruediv)__"
    r"|to|float|half|bfloat16|type|type_as|view|reshape|transpose|permute|contiguous|unsqueeze|squeeze"
)
# The fused function is run again where it keeps more than so many times what it is given and returns.
_MUCH = 1.25


class _Watch(TorchFunctionMode):
    """Finds attention in one run of a module's forward."""

    def __init__(self, name: str, weights: Weights) -> None:
        super().__init__()
        self._name, self._weights = name, weights
        self._checkpoint = checkpoint_in_force()
        # Results of regions that are still score matrices: identity to (tensor, its version, region, its number).
        self._scores: dict[int, tuple[weakref.ref[Tensor], int, Region, int]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return func(*args, **kwargs) if self._is_in_checkpoint() else self._fused(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name not in _PRODUCTS and not _STEPS.fullmatch(name):
            return func(*args, **kwargs)
        region = next((found for t in tensors_in(args) if (found := self._region_of(t)) is not None), None)
        if region is None:
            if name not in _PRODUCTS or not _makes_scores(args) or self._is_in_checkpoint():
                return func(*args, **kwargs)
            region = Region(f"attention in module {self._name!r}", self._weights)
            return self._step(region, func, args, kwargs, goes_on=True)
        return self._step(region, func, args, kwargs, goes_on=name not in _PRODUCTS)

    def _is_in_checkpoint(self) -> bool:
        """Inside of a checkpoint that the module itself made: its second run is not watched, and it keeps nothing."""
        return checkpoint_in_force() is not self._checkpoint

    def _region_of(self, tensor: Tensor) -> Region | None:
        found = self._scores.get(id(tensor))
        return (
            found[2] if found is not None and found[0]() is tensor and found[1] == tensor._version else None
        )

    def _step(
        self, region: Region, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, goes_on: bool
    ) -> Any:
        arguments = self._arguments(region, args, kwargs)
        device = next(tensors_in(args)).device
        again = replay(device) if getattr(func, "__name__", "") == "dropout" else None
        with saved_tensors_hooks(lambda tensor: Holder(region, tensor), region.open):
            result = func(*args, **kwargs)
        region.steps.append(Step(func, arguments, again))
        for tensor in tensors_in(result):
            if goes_on:
                self._scores[id(tensor)] = (weakref.ref(tensor), tensor._version, region, region.num_results)
            region.num_results += 1
        return result

    def _arguments(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        def source_of(tensor: Tensor) -> int:
            return self._scores[id(tensor)][3] if self._region_of(tensor) is region else -1

        return Arguments.of((args, kwargs), source_of, self._weights)

    def _fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region = Region(f"attention in module {self._name!r}", self._weights)
        arguments = self._arguments(region, args, kwargs)
        again = replay(next(tensors_in(args)).device)
        kept: dict[int, int] = {}

        def hold(tensor: Tensor) -> Holder:
            kept[storage_key(tensor)] = tensor.untyped_storage().nbytes()
            return Holder(region, tensor, self._weights.pack(tensor))

        with saved_tensors_hooks(hold, region.open):
            result = func(*args, **kwargs)
        tensors = (*tensors_in((args, kwargs)), result)
        given = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        if sum(kept.values()) > _MUCH * sum(given.values()):
            region.steps.append(Step(func, arguments, again))
            for reference in region.holders:
                holder = reference()
                if holder is not None:
                    holder.value = None
        return result


def install(modules: dict[str, nn.Module], weights: Weights) -> Callable[[], None]:
    """Watch the forwards of `modules` (name to module); returns what undoes it."""
    return replace_forwards(modules, lambda name, forward: _Watched(name, forward, weights))


class _Watched:
    """The forward of a module in which attention is looked for."""

    def __init__(self, name: str, forward: Callable[..., Any], weights: Weights) -> None:
        self._name, self._forward, self._weights = name, forward, weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        with _Watch(self._name, self._weights):
            return self._forward(*args, **kwargs)


def _makes_scores(args: Sequence[Any]) -> bool:
    """Whether a product is one of two activations: neither a weight nor a view of one, of three dims or more."""
    factors = [t for t in tensors_in(args) if t.dim() >= 3]
    return len(factors) == 2 and not any(_is_weight(t) for t in factors)


def _is_weight(tensor: Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, nn.Parameter)
