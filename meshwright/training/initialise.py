"""First values of a user's modules that were built on the meta device: `reset_parameters`, module by module.

Each module is reset with a generator seeded from (seed, module name), on a copy of that module alone: the values do not
depend on the mesh, on the order of modules or on which rank asks, and no more than one module is in memory at a time.
Simplification: a module whose `reset_parameters` looks at other modules gets what its copy sees.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.sharding.memory import Initialiser


def reset_initialiser(model: nn.Module, seed: int) -> Initialiser:
    """An initialiser for the meta parameters of `model`.

    Raises:
        ConfigError: E111 for a module with meta parameters and no `reset_parameters`.
    """
    modules = dict(model.named_modules())
    owners = {name: name.rpartition(".") for name, p in model.named_parameters() if p.is_meta}
    for name, (owner, _, _) in owners.items():
        _reset_of(modules[owner], owner, name)
    newest: dict[str, nn.Module] = {}

    def initialiser(name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        owner, _, attribute = owners[name]
        if owner not in newest:
            newest.clear()
            newest[owner] = reset_copy(modules[owner], owner, seed)
        value = newest[owner].get_parameter(attribute)
        return value.detach().flatten()[start:stop].to(dtype)

    return initialiser


def materialise_buffers(model: nn.Module, seed: int) -> None:
    """Give meta buffers the values that a reset of their module computes; non-persistent ones too."""
    for name, module in model.named_modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            twin = reset_copy(module, name, seed)
            for key, buffer in twin.named_buffers(recurse=False):
                setattr(module, key, buffer)


def reset_copy(module: nn.Module, name: str, seed: int) -> nn.Module:
    """A copy of `module` with memory on the CPU, reset by a generator seeded from (seed, name)."""
    reset = _reset_of(module, name, name)
    twin = copy.deepcopy(module).to_empty(device="cpu")
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=7).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest, "little"))
        reset(twin)
    return twin


def _reset_of(module: nn.Module, owner: str, name: str) -> Callable[[Any], None]:
    reset = getattr(type(module), "reset_parameters", None)
    if reset is None:
        raise ConfigError(
            "E111",
            f"{name!r} is on the meta device and its module {owner!r} ({type(module).__name__}) has no "
            f"reset_parameters() to give it values. Add one, or build the model on the CPU.",
        )
    return reset
