"""The loss as (sum, count): what a user may return, and the test of a bare scalar.

Simplification: whether a scalar is a mean over samples is decided on a few samples of the user's data, in evaluation
mode and float64; a loss that is a mean there and not elsewhere passes.
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
from meshwright.training.step import Loss
from meshwright.training.tree import batch_size, cast_batch

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
    _check_mean(model, loss, samples, float(value))

    def mean_over_samples(model: Any, batch: Any) -> tuple[Tensor, int]:
        count = batch_size(batch)
        return loss(model, batch) * count, count

    return mean_over_samples


def _check_mean(
    model: nn.Module, loss: Callable[[Any, Any], Any], samples: Sequence[Any], whole: float
) -> None:
    if len(samples) < 2:
        raise ConfigError(
            "E112",
            f"loss_fn returned a bare scalar, and {len(samples)} sample cannot show whether it is a mean over "
            f"samples. Return (sum, count).",
        )
    # Uneven cuts too: with as many ignored labels in each half, a mean over valid labels looks like one over samples.
    for cut in sorted({1, len(samples) // 3, len(samples) // 2, len(samples) - 1} - {0}):
        first = float(_probe(model, loss, samples[:cut]))
        second = float(_probe(model, loss, samples[cut:]))
        mean = (cut * first + (len(samples) - cut) * second) / len(samples)
        # Written so that a mean over no valid label at all (nan) fails too.
        if not abs(mean - whole) <= _TOLERANCE * max(abs(whole), abs(mean), 1.0):
            raise ConfigError(
                "E112",
                f"loss_fn returned a bare scalar that is not a mean over samples: {whole:.8g} for {len(samples)} "
                f"samples, but {mean:.8g} from the first {cut} and the rest. Its result would depend on how the batch "
                f"is cut. Return (sum, count), e.g. cross_entropy(..., reduction='sum') and the count of valid labels.",
            )


@torch.no_grad()
def _probe(model: nn.Module, loss: Callable[[Any, Any], Any], samples: Sequence[Any]) -> Any:
    """The loss of `samples` on a float64 copy in evaluation mode: no state of the model or generator moves."""
    twin = copy.deepcopy(model).double().eval()
    with torch.random.fork_rng(devices=[]), float64_throughout():
        return loss(twin, cast_batch(default_collate(list(samples)), torch.float64))
