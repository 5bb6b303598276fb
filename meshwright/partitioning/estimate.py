"""What RaNNC's search expects of a step: clock ticks of all forwards, then of all backwards, then one all-reduce.

Owns that formula, so that published logs can be recomputed. In tick t the stages with a micro-batch work; a tick lasts
as long as the slowest of them. Gradients: the bytes of the largest stage at one bandwidth, whatever the group.
Source: RaNNC's `DPStaging`, read for what it computes; its two published logs are regression data in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence

MESSAGE_BYTES_PER_SECOND = 20 * 2**30
ALL_REDUCE_BYTES_PER_SECOND = 10 * 2**30


def tick_seconds(forward: Sequence[float], backward: Sequence[float], num_microbatches: int) -> float:
    """Seconds of a step without gradients.

    Args:
        forward: of each stage and one micro-batch, messages included.
        backward: the same.
        num_microbatches: of the step.
    """
    total, stages = 0.0, len(forward)
    for tick in range(num_microbatches + stages - 1):
        first = max(0, tick - num_microbatches + 1)
        active = slice(first, min(stages, tick + 1))
        total += max(forward[active]) + max(backward[active])
    return total


def message_seconds(received: float, sent: float, *, replicas: int, num_microbatches: int) -> float:
    """Of one micro-batch of a stage, from bytes of the whole batch."""
    return (received + sent) / (replicas * num_microbatches) / MESSAGE_BYTES_PER_SECOND


def all_reduce_seconds(param_bytes: Sequence[float]) -> float:
    """From bytes of the weights of each stage."""
    return max(param_bytes) / ALL_REDUCE_BYTES_PER_SECOND
