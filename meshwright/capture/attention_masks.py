"""The attention that a transformers model runs, also while it is traced.

In training a model of transformers passes no mask to attention where nothing is padded: the kernel's causal flag does.
While it is traced, it cannot look at values and builds a mask of all pairs instead, which another kernel runs at other
costs. Owns the entry of transformers' registry of masks that answers as in training, for the time of a trace.
Limits: padding that a batch brings (`attention_mask`) stays a mask, as if something were padded; several sequences in
one row are seen by `position_ids` in the batch only.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

_KERNEL = "sdpa"


@contextlib.contextmanager
def masks_as_in_training(batch: Any) -> Iterator[None]:
    """Within, masks of transformers are what a training step gives attention.

    Args:
        batch: what the loss gets; with `position_ids` nothing is changed.
    """
    # Found, not imported: without transformers in the process there is no model of it.
    library = sys.modules.get("transformers.masking_utils")
    packed = isinstance(batch, Mapping) and "position_ids" in batch
    if library is None or packed:
        yield
        return
    registry = library.ALL_MASK_ATTENTION_FUNCTIONS
    theirs = registry[_KERNEL]

    def mask(*args: Any, **kwargs: Any) -> Any:
        window = kwargs.get("local_size")
        is_plain = not args and kwargs.get("attention_mask") is None and not kwargs.get("use_vmap")
        is_square = kwargs.get("q_length") is not None and kwargs.get("q_length") == kwargs.get("kv_length")
        if is_plain and is_square and (window is None or kwargs["kv_length"] < window):
            return None
        return theirs(*args, **kwargs)

    registry[_KERNEL] = mask
    try:
        yield
    finally:
        del registry[_KERNEL]
        if registry[_KERNEL] is not theirs:  # somebody's own entry stood in front of the library's
            registry[_KERNEL] = theirs
