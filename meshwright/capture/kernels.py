"""FLOPs of kernels that torch's counter does not know, and would count zero for.

Owns these formulas alone, so that counting a forward needs nothing of tracing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count


def flop_formulas() -> Mapping[Any, Callable[..., int]]:
    """Formulas of kernels that torch's counter lacks: it would count zero for them."""
    aten = torch.ops.aten
    found: dict[Any, Callable[..., int]] = {
        aten._scaled_dot_product_flash_attention_for_cpu: _flash_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_for_cpu_backward,
        aten._grouped_mm: _grouped_product,
    }
    # transformers' own op for experts in float32, known once transformers is imported.
    library = torch.ops.transformers
    if "transformers.integrations.moe" in sys.modules and hasattr(library, "grouped_mm_fallback_backward"):
        found[library.grouped_mm_fallback] = _grouped_product
        found[library.grouped_mm_fallback_backward] = _grouped_backward
    return found


def _flash_for_cpu(query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _flash_for_cpu_backward(grad: Any, query: Any, key: Any, value: Any, *_a: Any, **_kw: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def _grouped_product(left: Any, right: Any, *_args: Any, **_kwargs: Any) -> int:
    """Rows of `left` each meet one matrix of `right` (M, K) x (E, K, N); or two flat ones, for weight gradients."""
    rows = left[0] * left[1] if len(left) == 2 else left[0] * left[1] * left[2]
    return 2 * int(rows * right[-1])


def _grouped_backward(left: Any, right: Any, *_args: Any, **_kwargs: Any) -> int:
    return 2 * _grouped_product(left, right)
