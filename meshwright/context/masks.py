"""Which key a query may attend to, as plain data about global positions; never a matrix of the whole sequence.

Owns the rules and their bounds for runs of positions. Must not know ranks, kernels or models. What a mask says holds
for positions of the whole sequence, so it is the same however the sequence is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshwright.layout.sequence import Run

# What a block of scores looks like: nothing of it counts, all of it, or some.
Extent = Literal["empty", "full", "part"]


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """The conjunction of everything that is given; with nothing, every query attends to every key.

    Attributes:
        is_causal: keys at and before the query.
        window: the query and the `window` - 1 keys before it, and where the mask is not causal as many behind it.
        prefix: keys before this position are seen by every query, whatever is_causal and window say.
        documents: number of the document of every position, int64 `(batch, length)`; queries stay in theirs.
        valid: keys that are no padding, bool `(batch, length)`.
    """

    is_causal: bool = False
    window: int | None = None
    prefix: int = 0
    documents: Tensor | None = None
    valid: Tensor | None = None

    @property
    def is_plain_causal(self) -> bool:
        """Whether only is_causal hides anything."""
        return self.is_causal and self.window is None and not self.prefix and not self._has_rows

    @property
    def _has_rows(self) -> bool:
        return self.documents is not None or self.valid is not None

    def extent(self, queries: Run, keys: Run) -> Extent:
        """What is known of a block from its bounds; "part" where samples or a diagonal decide."""
        (first, end), (low, high) = queries, keys
        newest, oldest = high - 1, low
        if newest < self.prefix:
            return "part" if self._has_rows else "full"
        if low >= self.prefix and (
            (self.is_causal and oldest > end - 1)
            or (self.window is not None and first - newest >= self.window)
            or (self.window is not None and not self.is_causal and oldest - (end - 1) >= self.window)
        ):
            return "empty"
        is_full = (not self.is_causal or newest <= first) and (
            self.window is None
            or ((end - 1) - oldest < self.window and (self.is_causal or newest - first < self.window))
        )
        return "full" if is_full and not self._has_rows else "part"

    def keys_of(self, queries: Run, keys: Run) -> Run:
        """The part of `keys` outside which `queries` see nothing, by bounds alone."""
        (first, end), (low, high) = queries, keys
        if self.window is not None and low >= self.prefix:
            low = max(low, first - self.window + 1)
        if self.is_causal:
            high = min(high, max(end, self.prefix))
        elif self.window is not None:
            high = min(high, max(end + self.window - 1, self.prefix))
        return (low, max(low, high))

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether each query may attend to each key.

        Args:
            queries: positions, int64 `(queries,)`.
            keys: positions, int64 `(keys,)`.

        Returns:
            bool `(batch or 1, 1, queries, keys)`.
        """
        distance = queries[:, None] - keys
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.is_causal:
            seen &= distance >= 0
        if self.window is not None:
            seen &= (distance if self.is_causal else distance.abs()) < self.window
        if self.prefix:
            seen |= keys < self.prefix
        seen = seen[None, None]
        if self.documents is not None:
            seen = seen & (self.documents[:, queries, None] == self.documents[:, None, keys])[:, None]
        if self.valid is not None:
            seen = seen & self.valid[:, None, None, keys]
        return seen
