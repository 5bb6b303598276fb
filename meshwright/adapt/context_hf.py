"""Attention of transformers models over ranks: their registries of attention and of masks have an entry of ours.

Owns the entry, and the reading of a mask from the functions of which transformers composes it; one that is not known is
refused by name, never dropped. Documents, padding and positions come from the batch, not from here: what transformers
would derive from this rank's positions is ignored. Written against transformers 5.24.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from meshwright.adapt.context_parallel import Kind, described_attention
from meshwright.errors import PlanError

NAME = "meshwright_context"
# Arguments of attention that change its scores or weights.
_CHANGES = ("position_bias", "softcap", "s_aux", "head_mask", "alibi", "score_mod", "block_mask")


def models_in(model: nn.Module) -> list[Any]:
    """The transformers models in `model`, itself included."""
    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel

    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def install(model: nn.Module) -> Callable[[], None]:
    """Give the transformers models in `model` our attention; returns what undoes it.

    Raises:
        PlanError: E254 for a model of an encoder and a decoder.
    """
    found = models_in(model)
    if not found:
        return _nothing
    from transformers import AttentionInterface, AttentionMaskInterface

    for module in found:
        if module.config.is_encoder_decoder:
            raise PlanError(
                "E254",
                f"plan.cp: {type(module).__name__} has an encoder and a decoder: two sequences. Set plan.cp=1.",
            )
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    before = found[0].config._attn_implementation
    found[0].set_attn_implementation(NAME)
    return lambda: found[0].set_attn_implementation(before)


def _nothing() -> None:
    pass


def _attention(  # noqa: PLR0913 - transformers' own parameters
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Kind | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    for name in _CHANGES:
        if others.get(name) is not None:
            raise _refused(f"the attention of {type(module).__name__} has {name}")
    if isinstance(attention_mask, Tensor):
        shape = tuple(attention_mask.shape)
        raise _refused(f"{type(module).__name__} gives its attention a mask of shape {shape}")
    causal = module.is_causal if is_causal is None else is_causal
    kind = attention_mask or Kind(bool(causal))
    out = described_attention(query, key, value, kind, dropout_p=dropout, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _mask(*_args: Any, mask_function: Callable[..., Any], **_others: Any) -> Kind:
    """What transformers' mask function means for positions of the whole sequence."""
    return describe_mask(mask_function)


def describe_mask(function: Callable[..., Any]) -> Kind:
    """The mask that functions of transformers.masking_utils compose.

    Raises:
        PlanError: E250 for one that is not known.
    """
    name = function.__qualname__.partition(".")[0]
    inner = inspect.getclosurevars(function).nonlocals
    if name == "causal_mask_function":
        return Kind(is_causal=True)
    # Documents are the batch's; positions of this rank jump, which looks like several.
    if name in ("bidirectional_mask_function", "packed_sequence_mask_function"):
        return Kind(is_causal=False)
    if name == "remap_positions_for_packed_sequence":
        return describe_mask(inner["mask_function"])
    if name == "sliding_window_overlay":
        return Kind(is_causal=False, window=inner["sliding_window"])
    if name == "sliding_window_bidirectional_overlay":
        return Kind(is_causal=False, window=inner["sliding_window"] + 1)
    if name == "and_masks":
        parts = [describe_mask(part) for part in inner["mask_functions"]]
        windows = [part.window for part in parts if part.window is not None]
        return Kind(any(part.is_causal for part in parts), min(windows, default=None))
    raise _refused(f"the mask {name} of transformers")


def _refused(what: str) -> PlanError:
    return PlanError(
        "E250",
        f"plan.cp > 1: {what} is not built over ranks. Built: causal and full masks, sliding windows, documents by "
        f"position_ids, padding by attention_mask. Set plan.cp=1.",
    )
