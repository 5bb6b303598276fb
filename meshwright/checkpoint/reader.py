"""Loading: flat intervals of logical tensors from whatever files hold them.

Owns which bytes are read: only those of the intervals that are asked for, straight into the caller's memory. Knows
nothing of who asks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from meshwright.checkpoint.folder import read_manifest
from meshwright.checkpoint.manifest import LogicalTensor, Manifest
from meshwright.checkpoint.shardfile import TensorFile, damaged
from meshwright.layout.stripes import Run, Stripe

# Files that are open at once; a checkpoint of thousands of ranks has more than a process may open.
_MAX_OPEN = 64


class CheckpointReader:
    """An open checkpoint; a context manager.

    Args:
        path: the checkpoint.
        manifest: its manifest where it has been read already.

    Raises:
        CheckpointError: E502, E503 as `read_manifest`.
    """

    def __init__(self, path: Path, manifest: Manifest | None = None) -> None:
        self.path = path
        self.manifest = manifest or read_manifest(path)
        self._open: dict[int, TensorFile] = {}
        self._bytes_of_closed = 0

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        for number in list(self._open):
            self._close(number)

    @property
    def bytes_read(self) -> int:
        """Bytes of elements read so far."""
        return self._bytes_of_closed + sum(file.bytes_read for file in self._open.values())

    def model_tensor(self, name: str) -> LogicalTensor:
        """The parameter or buffer `name`, also under a further name of a tied one; KeyError if there is none."""
        model = self.manifest.model
        return model[name] if name in model else model[self.manifest.run.aliases[name]]

    def read_into(self, tensor: LogicalTensor, out: Tensor, *, start: int = 0) -> None:
        """Read flat elements [start, start + out.numel()) of `tensor` into the 1-D tensor `out`.

        `out` may have another element type, and lie on any device.

        Raises:
            CheckpointError: E502 when a file is damaged.
        """
        self.read_runs_into(tensor, out, [(start, 0, out.numel())])

    def read_runs_into(self, tensor: LogicalTensor, out: Tensor, runs: Sequence[Run]) -> None:
        """Read several runs of flat elements of `tensor`, ascending, into their places in the 1-D tensor `out`.

        Raises:
            CheckpointError: E502 when a file is damaged.
        """
        starts = [start for start, _, _ in runs]
        done = 0
        for part in tensor.parts:
            stripe = part.stripe
            # The run before may reach into this part.
            first = max(0, bisect_right(starts, part.start) - 1)
            for start, low, high in runs[first : bisect_left(starts, part.stop)]:
                for begin, place, length in _overlaps(stripe, start, start + high - low):
                    target = out[low + begin - start : low + begin - start + length]
                    self._file(part.file).read_into(part.key, target, start=place)
                    done += length
        wanted = sum(high - low for _, low, high in runs)
        if done != wanted:
            raise damaged(
                self.path, f"of {tensor.label} {wanted - done:,} of {wanted:,} elements are missing"
            )

    def read(self, tensor: LogicalTensor) -> Tensor:
        """The whole tensor, on the host."""
        out = torch.empty(tensor.numel, dtype=getattr(torch, tensor.dtype))
        self.read_into(tensor, out)
        return out.view(tensor.shape)

    def _file(self, number: int) -> TensorFile:
        if number not in self._open:
            if len(self._open) >= _MAX_OPEN:
                self._close(next(iter(self._open)))
            self._open[number] = TensorFile(self.path / self.manifest.files[number].name)
        return self._open[number]

    def _close(self, number: int) -> None:
        file = self._open.pop(number)
        self._bytes_of_closed += file.bytes_read
        file.close()


def _overlaps(stripe: Stripe, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(first in the whole, first in the stored tensor, length) of what a stored stripe has of [start, stop)."""
    stride = stripe.stride or stripe.length or 1
    first = max(0, (start - stripe.start - stripe.length) // stride + 1)
    last = min(stripe.count, -((stripe.start - stop) // stride))
    for number in range(first, last):
        at = stripe.start + number * stripe.stride
        low, high = max(start, at), min(stop, at + stripe.length)
        if low < high:
            yield low, number * stripe.length + low - at, high - low
