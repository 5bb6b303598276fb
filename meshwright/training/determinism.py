"""What makes a run repeat bit by bit: seeds and kernels. The order of reductions is fixed elsewhere (`comm/`)."""

from __future__ import annotations

import torch


def prepare(*, seed: int, deterministic: bool) -> None:
    """Seed torch's generator on this rank; `deterministic` admits only kernels that repeat their bits.

    Every rank gets the same seed: nothing that affects the result may differ by rank.
    """
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
