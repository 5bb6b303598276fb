"""First values of modules that were built on the meta device: reset module by module, or read from where they lie.

Each module is reset with a generator seeded from (seed, module name), on a copy of that module alone: the values do not
depend on the mesh, on the order of modules or on which rank asks, and no more than one module is in memory at a time.
A module resets itself by `reset_parameters`. Below a model that initialises its parts by `_init_weights`, as those of
transformers do, this method is called on a copy of the whole repeated block, since it may look at more than one module.
Simplification: a reset that looks at modules outside its copy gets what the copy sees.
"""

from __future__ import annotations

import copy
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.sharding.memory import Initialiser
from meshwright.sharding.units import find_units


class LeanBuild(ABC):
    """A function that builds a model, and that can also build it without memory and say its values piece by piece."""

    @abstractmethod
    def __call__(self) -> nn.Module:
        """The model with all its values."""

    @abstractmethod
    def skeleton(self) -> nn.Module:
        """The model on the meta device."""

    @abstractmethod
    def first_values(self, model: nn.Module, seed: int) -> Initialiser:
        """Values of the parameters of `model`, a skeleton; its meta buffers get memory and values."""


def call_build(build: Callable[[], Any]) -> Any:
    """What `build` makes, without memory if it can."""
    return build.skeleton() if isinstance(build, LeanBuild) else build()


def first_values(build: Callable[[], Any], model: nn.Module, seed: int) -> Initialiser:
    """Values of the meta parameters of `model`, which `call_build(build)` made; its meta buffers get theirs.

    Raises:
        ConfigError: E111 for a module without memory that cannot be reset; E121 for files of another model.
    """
    if isinstance(build, LeanBuild):
        return build.first_values(model, seed)
    materialise_buffers(model, seed)
    return reset_initialiser(model, seed)


@dataclass(frozen=True)
class _Reset:
    """How a module gets values.

    Attributes:
        root: name of the module of which a copy is made.
        function: gives values to a copy of it.
        in_single: draw in float32 whatever the model's element type, so that all precisions start alike.
    """

    root: str
    function: Callable[[Any], None]
    in_single: bool = False


def reset_initialiser(model: nn.Module, seed: int) -> Initialiser:
    """An initialiser for the meta parameters of `model`.

    Raises:
        ConfigError: E111 for a module with meta parameters and no way to reset it.
    """
    if all(parameter.is_meta for parameter in model.parameters()):
        model = copy.deepcopy(
            model
        )  # free of charge, and whole where `model` itself is split over ranks later
    resets = _Resets(model)
    owners = {name: resets.of(name) for name, p in model.named_parameters() if p.is_meta}
    newest: dict[str, nn.Module] = {}

    def initialiser(name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        reset = owners[name]
        if reset.root not in newest:
            newest.clear()
            newest[reset.root] = resets.copy(reset, seed)
        value = newest[reset.root].get_parameter(name.removeprefix(f"{reset.root}."))
        return value.detach().flatten()[start:stop].to(dtype)

    return initialiser


def materialise_buffers(model: nn.Module, seed: int) -> None:
    """Give meta buffers the values that a reset of their module computes; non-persistent ones too."""
    resets = _Resets(model)
    for name, module in model.named_modules():
        meta = [key for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if meta:
            reset = resets.of(f"{name}.{meta[0]}" if name else meta[0], alone=True)
            twin = resets.copy(reset, seed)
            for key in meta:
                setattr(module, key, twin.get_buffer(key).to(module.get_buffer(key).dtype))


class _Resets:
    """Finds for each tensor of a model how its module is reset."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.units = list(find_units(model))

    def of(self, tensor: str, *, alone: bool = False) -> _Reset:
        """The reset that gives `tensor` its value; `alone`: by a copy of its own module, not of a block."""
        owner = tensor.rpartition(".")[0]
        for ancestor in _ancestors(owner):
            method = getattr(type(self.modules[ancestor]), "_init_weights", None)
            if method is not None:
                root = (
                    owner
                    if alone
                    else next((u for u in self.units if f"{owner}.".startswith(f"{u}.")), owner)
                )
                bound = partial(method, self.modules[ancestor])
                return _Reset(root, partial(_apply_to_parts, method=bound), in_single=True)
        return _Reset(owner, _reset_of(self.modules[owner], owner, tensor))

    def copy(self, reset: _Reset, seed: int) -> nn.Module:
        """A copy of the root of `reset` with memory and values on the CPU."""
        return _with_values(self.modules[reset.root], reset, seed)


def _ancestors(name: str) -> Iterator[str]:
    """`a.b.c`, `a.b`, `a` and the empty name."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _apply_to_parts(module: nn.Module, method: Callable[[nn.Module], None]) -> None:
    """Children first, as transformers goes: a block may draw anew what its parts have drawn."""
    for part in module.children():
        _apply_to_parts(part, method=method)
    method(module)


def reset_copy(module: nn.Module, name: str, seed: int) -> nn.Module:
    """A copy of `module` with memory on the CPU, reset by a generator seeded from (seed, name)."""
    return _with_values(module, _Reset(name, _reset_of(module, name, name)), seed)


def _with_values(module: nn.Module, reset: _Reset, seed: int) -> nn.Module:
    twin = copy.deepcopy(module).to_empty(device="cpu")
    if reset.in_single:
        twin.float()
    digest = hashlib.blake2b(f"{seed}\0{reset.root}".encode(), digest_size=7).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest, "little"))
        for tensor in _tensors(twin):
            tensor.fill_(_no_value(tensor))
        reset.function(twin)
    _check_values(twin, reset.root)
    return twin


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _no_value(tensor: Tensor) -> float:
    """What stands in memory that no reset has written, so that it is an error and never a number by chance."""
    if tensor.is_floating_point() or tensor.is_complex():
        return math.nan
    return 0 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min


def _check_values(twin: nn.Module, root: str) -> None:
    for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
        empty = _no_value(tensor)
        left = tensor.isnan() if math.isnan(empty) else tensor == empty
        if tensor.dtype not in (torch.bool, torch.uint8) and bool(left.any()):
            raise ConfigError(
                "E111",
                f"the reset of {root or 'the model'!r} ({type(twin).__name__}) leaves {name!r} of shape "
                f"{tuple(tensor.shape)} without a value. Reset it too, or build the model on the CPU.",
            )


def _reset_of(module: nn.Module, owner: str, name: str) -> Callable[[Any], None]:
    reset = getattr(type(module), "reset_parameters", None)
    if reset is None:
        raise ConfigError(
            "E111",
            f"{name!r} is on the meta device and its module {owner!r} ({type(module).__name__}) has no "
            f"reset_parameters() to give it values. Add one, or build the model on the CPU.",
        )
    return reset
