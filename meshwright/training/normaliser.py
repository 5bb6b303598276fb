"""The loss as (sum, count): what a user may return, and the test of a bare scalar.

Simplification: whether a scalar is a mean over samples is decided on a few samples of the user's data, in evaluation
mode, in float64 where the model is not sharded yet; a loss that is a mean there and not elsewhere passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshwright.adapt.float64 import float64_throughout
from meshwright.errors import ConfigError
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.step import Loss
from meshwright.training.tree import batch_size, cast_batch, rows_of

_TOLERANCE = 1e-9


def sum_and_count(model: nn.Module, loss: Callable[[Any, Any], Any], samples: Sequence[Any]) -> Loss:
    """`loss` itself if it returns (sum, count); else the bare scalar times the number of samples, if it is a mean.

    Args:
        model: with values, not sharded yet.
        loss: the user's function.
        samples: some items of the dataset, at least 2 for a bare scalar; the more, and the more different, the better.

    Raises:
        ConfigError: E112 when a bare scalar is not the mean over samples, E111 for anything else.
    """
    value = _probe(model, loss, samples)
    if isinstance(value, tuple) and len(value) == 2:
        return loss
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ConfigError(
            "E111", f"loss_fn(model, batch) must return (sum, count); it returned {type(value).__name__}"
        )
    size = len(samples)
    # Uneven cuts too: with as many ignored labels in each half, a mean over valid labels looks like one over samples.
    cuts = sorted({1, size // 3, size // 2, size - 1} - {0})
    _check_mean(
        lambda rows: float(_probe(model, loss, samples[rows])),
        size,
        cuts=cuts,
        whole=float(value),
        tolerance=_TOLERANCE,
    )
    return _over_samples(loss)


def checked_loss(engine: ShardingEngine, loss: Callable[[Any, Any], Any], batch: Any) -> Loss:
    """As `sum_and_count`, on a model that is sharded already: tried in evaluation on one micro-batch of this rank.

    Args:
        engine: with the model; every rank calls.
        loss: the user's function.
        batch: a collated micro-batch, of 2 samples or more for a bare scalar.

    Raises:
        ConfigError: E112 when a bare scalar is not the mean over samples, E111 for anything else.
    """
    size = batch_size(batch)

    def probe(rows: slice) -> Any:
        with engine.evaluation(), torch.random.fork_rng(devices=[]):
            return loss(engine.model, rows_of(batch, rows))

    was_training = [module for module in engine.model.modules() if module.training]
    engine.model.eval()
    try:
        value = probe(slice(size))
        if isinstance(value, tuple) and len(value) == 2:
            return loss
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ConfigError(
                "E111", f"loss_fn(model, batch) must return (sum, count); it returned {type(value).__name__}"
            )
        # The same number of forwards on every rank, also where one has a sample more: weights are gathered in each.
        _check_mean(
            lambda rows: float(probe(rows)),
            size,
            cuts=[1, size // 2],
            whole=float(value),
            tolerance=_tolerance_of(value.dtype),
        )
    finally:
        for module in was_training:
            module.training = True
    return _over_samples(loss)


def _tolerance_of(dtype: torch.dtype) -> float:
    return _TOLERANCE if dtype == torch.float64 else torch.finfo(dtype).eps * 1e3


def _over_samples(loss: Callable[[Any, Any], Any]) -> Loss:
    """(sum, count) from a mean over samples."""

    def mean_over_samples(model: Any, batch: Any) -> tuple[Tensor, int]:
        count = batch_size(batch)
        return loss(model, batch) * count, count

    return mean_over_samples


def _check_mean(
    value_of: Callable[[slice], float], size: int, *, cuts: Sequence[int], whole: float, tolerance: float
) -> None:
    """Raise E112 unless the value of `size` samples is the weighted mean of those of the two parts at each cut."""
    if size < 2:
        raise ConfigError(
            "E112",
            f"loss_fn returned a bare scalar, and {size} sample cannot show whether it is a mean over "
            f"samples. Return (sum, count).",
        )
    for cut in cuts:
        mean = (cut * value_of(slice(cut)) + (size - cut) * value_of(slice(cut, size))) / size
        # Written so that a mean over no valid label at all (nan) fails too.
        if not abs(mean - whole) <= tolerance * max(abs(whole), abs(mean), 1.0):
            raise ConfigError(
                "E112",
                f"loss_fn returned a bare scalar that is not a mean over samples: {whole:.8g} for {size} "
                f"samples, but {mean:.8g} from the first {cut} and the rest. Its result would depend on how the batch "
                f"is cut. Return (sum, count), e.g. cross_entropy(..., reduction='sum') and the count of valid labels.",
            )


@torch.no_grad()
def _probe(model: nn.Module, loss: Callable[[Any, Any], Any], samples: Sequence[Any]) -> Any:
    """The loss of `samples` on a float64 copy in evaluation mode: no state of the model or generator moves."""
    twin = copy.deepcopy(model).double().eval()
    with torch.random.fork_rng(devices=[]), float64_throughout():
        return loss(twin, cast_batch(default_collate(list(samples)), torch.float64))
