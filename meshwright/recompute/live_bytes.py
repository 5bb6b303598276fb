"""Bytes of live tensors while anything runs: real, fake or meta ones, on any device.

Counts storages, not tensors: views and changes in place are free. A storage is counted from the operation that makes
it to the end of its life; one that was made unseen (before, or by a transport) is not. Memory inside of an operation
(workspaces) and of storages that are resized is not seen. Linear in the number of operations, about 10 µs each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.nested import storage_key, tensors_in


class LiveBytes(TorchDispatchMode):
    """Enter it around what is to be measured.

    Args:
        known: tensors that are there already and are not counted.
        label: names what is made now; asked once for each new storage. Its bytes are counted under that name.
        mark: says where the run is; asked at each new peak.

    Attributes:
        now: bytes alive, by label.
        made: bytes of all storages so far, freed ones included.
        peak: most bytes alive at once, all labels together.
        at_peak: bytes by label at that moment.
        peak_mark: where that was.
    """

    def __init__(
        self,
        known: Iterable[Tensor] = (),
        *,
        label: Callable[[], str] = lambda: "activations",
        mark: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__()
        self._known = {storage_key(tensor) for tensor in known}
        self._label, self._mark = label, mark
        self._sizes: dict[int, tuple[str, int]] = {}
        self.now: dict[str, int] = {}
        self.made = 0
        self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.peak_mark = ""

    def restart_peak(self) -> None:
        """Look for the peak anew from here."""
        self.peak, self.at_peak = self.total, dict(self.now)

    @property
    def total(self) -> int:
        """Bytes alive."""
        return sum(self.now.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        new = [tensor for tensor in tensors_in(result) if self._is_unseen(storage_key(tensor))]
        if new:
            # What `torch.tensor` made has no operation but this one.
            fresh = func is torch.ops.aten.lift_fresh.default
            given = set() if fresh else {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
            for tensor in new:
                self._add(tensor, given)
        if self.total > self.peak:
            self.peak, self.at_peak, self.peak_mark = self.total, dict(self.now), self._mark()
        return result

    def _is_unseen(self, key: int) -> bool:
        return key not in self._sizes and key not in self._known

    def _add(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if not self._is_unseen(key) or key in given:
            return
        label, nbytes = self._label(), storage.nbytes()
        self._sizes[key] = (label, nbytes)
        self.made += nbytes
        self.now[label] = self.now.get(label, 0) + nbytes
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        label, nbytes = self._sizes.pop(key)
        self.now[label] -= nbytes


def saved_bytes(forward: Callable[[], Tensor], known: Iterable[Tensor] = ()) -> int:
    """Bytes that are alive between the forward and the backward of `forward`: what it keeps, its result left out."""
    with LiveBytes(known) as meter:
        result = forward()
        total = meter.total
        own = result.untyped_storage().nbytes() if isinstance(result, torch.Tensor) else 0
    return total - own
