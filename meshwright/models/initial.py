"""First values of parameters as a function of (seed, parameter name, index), and of nothing else.

Owns the draw, so that a model starts the same however its parameters are cut over ranks: each rank draws
just the flat elements it holds. Must not know meshes, layouts or ranks.

[Note: one counter per four elements] Element i of a parameter uses word i % 4 of the i // 4-th output of a
Philox4x64-10 generator (Salmon et al. 2011) keyed by a hash of (seed, name); nothing depends on where a draw
starts. The normal quantile function is evaluated element by element in float64, so a cut changes no bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

Kind = Literal["normal", "uniform", "zeros", "ones"]
# Elements per pass: 512 KiB of float64, so that a pass stays in a core's cache.
_CHUNK_NUMEL = 1 << 16
_WORDS_PER_COUNTER = 4
_UNIFORM_BITS = 52


@dataclass(frozen=True)
class Initial:
    """How one parameter starts.

    Attributes:
        kind: normal (mean 0, standard deviation `scale`), uniform (in -scale..scale), zeros or ones.
        scale: no part in zeros and ones.
    """

    kind: Kind
    scale: float = 1.0


class KnowsInitialValues(Protocol):
    """A module that says how each of its parameters starts."""

    def initial_values(self) -> Mapping[str, Initial]:
        """Parameter name, as `named_parameters()` gives it, to its start."""


def draw(initial: Initial, *, seed: int, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Values of the flat elements start..stop-1 of the whole parameter `name`.

    Drawing 0..n at once or in any pieces gives the same bits. Shape `(stop - start,)`, on the CPU.
    """
    assert 0 <= start <= stop, f"{name}: cannot draw elements {start}..{stop}"
    values = torch.empty(stop - start, dtype=dtype)
    draw_into(values, initial, seed=seed, name=name, start=start)
    return values


@torch.no_grad()
def draw_into(out: Tensor, initial: Initial, *, seed: int, name: str, start: int) -> None:
    """Fill `out`, shape `(n,)`, any floating dtype and device, with elements start..start+n-1 of `name`."""
    if initial.kind == "zeros":
        out.zero_()
        return
    if initial.kind == "ones":
        out.fill_(1.0)
        return
    assert out.dim() == 1, f"{name}: draws fill flat tensors, got shape {tuple(out.shape)}"
    key = _key(seed, name)
    for offset in range(0, out.numel(), _CHUNK_NUMEL):
        piece = out[offset : offset + _CHUNK_NUMEL]
        values = _uniform(key, start + offset, piece.numel())
        if initial.kind == "normal":
            torch.special.ndtri(values, out=values).mul_(initial.scale)
        else:
            values.mul_(2).sub_(1).mul_(initial.scale)
        piece.copy_(values)


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


def _uniform(key: int, start: int, numel: int) -> Tensor:
    """Float64 values strictly between 0 and 1, `(numel,)`; see [Note: one counter per four elements]."""
    counter, skipped = divmod(start, _WORDS_PER_COUNTER)
    words = np.random.Philox(key=key, counter=counter).random_raw(skipped + numel)[skipped:]
    # 52 bits and a half: 53 would round the largest word to 1, whose normal quantile is infinite.
    words >>= np.uint64(64 - _UNIFORM_BITS)
    return torch.from_numpy(words.view(np.int64)).double().add_(0.5).mul_(2.0**-_UNIFORM_BITS)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter of a whole, real model in place; a mesh that draws its pieces gets the same bits.

    Args:
        model: a module with `initial_values()`, not on the meta device.
        seed: any integer.

    Raises:
        ValueError: a parameter has no entry in `initial_values()`, or an entry has no parameter.
    """
    values = cast(KnowsInitialValues, model).initial_values()
    parameters = dict(model.named_parameters())
    odd = sorted(values.keys() ^ parameters.keys())
    if odd:
        raise ValueError(
            f"initial_values() and named_parameters() differ in {', '.join(odd)}; name each once"
        )
    for name, parameter in parameters.items():
        assert parameter.is_contiguous(), f"{name} is not contiguous: its flat order is not its global order"
        draw_into(parameter.view(-1), values[name], seed=seed, name=name, start=0)
