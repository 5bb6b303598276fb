"""This rank's batches: the sample order and the index law put together, and the held-out batches.

Owns where user tensors enter the step. Must not know models or process groups: what it returns is a function
of (dataset, seed, step, micro-step, geometry), so nothing needs saving to resume, on this mesh or another.

Simplification: samples are read and collated in the calling thread, without prefetching.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import default_collate

from meshwright.data.index_law import BatchGeometry, even_part
from meshwright.data.order import sample_ids
from meshwright.errors import ConfigError, PlanError

# Runs of different seeds are evaluated on the same samples.
_HELDOUT_SEED = 0


class MapStyle(Protocol):
    """A dataset with a length and items that torch's default collate can stack."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Sample `index` of 0 .. len - 1."""
        ...


class Batches:
    """Collated micro-batches of one data-parallel rank.

    Model-parallel ranks of one `dp_rank` construct equal `Batches` and read the same samples.
    """

    def __init__(
        self, dataset: MapStyle, geometry: BatchGeometry, *, seed: int, shuffle: bool = True
    ) -> None:
        """Cut the stream of `dataset`'s samples by `geometry`.

        Raises:
            ConfigError: E105 where the dataset is empty.
            PlanError: E203 where the micro-steps do not divide the batch or leave a rank without a sample.
        """
        if len(dataset) < 1:
            raise ConfigError("E105", "the dataset has 0 samples; training needs at least 1")
        _check_geometry(geometry)
        self.dataset = dataset
        self.geometry = geometry
        self.seed = seed
        self.shuffle = shuffle

    def sample_ids(self, step: int, microbatch: int) -> npt.NDArray[np.int64]:
        """Dataset indices of this rank's samples in one micro-step, int64 (samples,)."""
        part = self.geometry.rank_range(step, microbatch)
        return sample_ids(
            part.start, len(part), num_samples=len(self.dataset), seed=self.seed, shuffle=self.shuffle
        )

    def micro_batch(self, step: int, microbatch: int) -> Any:
        """This rank's samples of one micro-step, stacked along a new first dim by torch's default collate."""
        return default_collate([self.dataset[int(index)] for index in self.sample_ids(step, microbatch)])

    def position_after(self, step: int) -> int:
        """Global stream position when `step` (0 is the first) is done: samples consumed by all ranks."""
        return self.geometry.start_of(step + 1)


def _check_geometry(geometry: BatchGeometry) -> None:
    batch, micro, dp = geometry.global_batch, geometry.num_microbatches, geometry.dp_size
    if batch % micro == 0 and batch // micro >= dp:
        return
    multiples = (batch // micro * micro, -(-batch // micro) * micro)
    nearest = ", ".join(str(value) for value in sorted({max(value, micro * dp) for value in multiples}))
    raise PlanError(
        "E203",
        f"train.global_batch={batch} cannot be cut into {micro} equal micro-steps with a sample for each of "
        f"{dp} data-parallel ranks. Nearest that can: {nearest}. It is never changed silently.",
    )


def heldout_batches(
    dataset: MapStyle,
    num_samples: int,
    *,
    batch_size: int,
    dp_size: int = 1,
    dp_rank: int = 0,
    most_ranks: int | None = None,
) -> Iterator[Any]:
    """This rank's batches of an evaluation over `num_samples` held-out samples (fewer where there are fewer).

    Over all ranks every chosen sample occurs exactly once, and the choice depends on the dataset's length and
    `num_samples` alone; so sum and count over ranks give one value on every mesh. Every rank yields the same
    number of batches, none empty, so collectives inside them match. What ranks read as one batch is cut from the
    samples first and then over them, so that it is the same for places of a pipeline with unlike numbers of ranks.
    Batches are as equal as can be; one has `batch_size` samples at most, or one more where ranks do not divide them.

    Args:
        dataset: the held-out split.
        num_samples: samples over all ranks.
        batch_size: samples per rank and batch.
        dp_size: number of data-parallel ranks.
        dp_rank: index of this rank among them.
        most_ranks: of the place of a pipeline with the most; None: all have `dp_size`.

    Raises:
        ConfigError: E105 where there are fewer samples than data-parallel ranks.
    """
    assert batch_size >= 1, f"batch_size {batch_size} must be at least 1"
    total, most = min(num_samples, len(dataset)), most_ranks or dp_size
    if total < most:
        raise ConfigError(
            "E105",
            f"evaluation has {total} held-out samples for {most} data-parallel ranks and needs one "
            "for each; raise train.eval_samples, set data.eval to a larger source, or lower data.seq_len",
        )
    chosen = np.sort(sample_ids(0, total, num_samples=len(dataset), seed=_HELDOUT_SEED))
    num_batches = -(-(total // most) // batch_size)
    return _collated(dataset, chosen, num_batches, dp_size=dp_size, dp_rank=dp_rank)


def _collated(
    dataset: MapStyle, ids: npt.NDArray[np.int64], num_batches: int, *, dp_size: int, dp_rank: int
) -> Iterator[Any]:
    for number in range(num_batches):
        whole = even_part(len(ids), num_batches, number)
        part = even_part(len(whole), dp_size, dp_rank)
        yield default_collate([dataset[int(ids[whole.start + index])] for index in part])
