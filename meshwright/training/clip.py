"""One gradient norm over all logical parameters, and the factor that clips by it."""

from __future__ import annotations

# As torch.nn.utils.clip_grad_norm_: a norm of exactly the limit is left alone up to this much.
_NORM_EPSILON = 1e-6


def clip_coefficient(norm: float, limit: float | None) -> float:
    """Factor that brings a gradient of `norm` to at most `limit`; 1.0 without a limit."""
    if limit is None:
        return 1.0
    return min(1.0, limit / (norm + _NORM_EPSILON))
