"""An unmodified model with its loss through `torch.export`, with batch and sequence left open.

Owns which dims of a batch are the two sizes, and the call of torch.export on whatever device the model lives, the meta
device included: nothing is computed. Must not know task graphs (`encode.py` reads the result).
Limit: a Python branch on a size is taken as at capture, and a hand-written backward is replaced by autograd's own
(`hand_written_backwards` tells).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Sizes:
    """The two sizes of a batch.

    Attributes:
        batch: samples.
        sequence: positions; 0 without such a dim.
        dims: for each tensor of the batch, in order, its dim of the sequence or None. The dim of samples is 0.
    """

    batch: int
    sequence: int
    dims: tuple[int | None, ...]


class WithLoss(nn.Module):
    """`loss(model, batch)` as the forward of a module; the model's names get the prefix `model.`."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> Any:
        """What the loss returns."""
        return self._loss(self.model, batch)


def sizes_of(batch: Any) -> Sizes:
    """Batch and sequence of a batch of tensors.

    Dim 0 counts samples. Dim 1 counts positions in integer tensors of two dims (tokens, labels, masks), and in other
    tensors of the batch of at least three dims where it has the same extent.

    Raises:
        ValueError: there is no tensor, or they differ in dim 0.
    """
    leaves = tensors_of(batch)
    counts = {x.shape[0] for x in leaves if x.dim()}
    if len(counts) != 1:
        raise ValueError(f"tensors of a batch agree in dim 0, the samples; here it is {sorted(counts)}")
    integers = [x for x in leaves if x.dim() == 2 and not x.is_floating_point()]
    lengths = {x.shape[1] for x in integers}
    sequence = max(lengths, default=0)
    dims = tuple(
        1
        if sequence and x.dim() > 1 and x.shape[1] == sequence and (x.dim() > 2 or not x.is_floating_point())
        else None
        for x in leaves
    )
    return Sizes(counts.pop(), sequence, dims)


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of nested dicts, lists and tuples, in torch's order."""
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def export(model: nn.Module, loss: Loss, batch: Any, *, free: tuple[str, ...]) -> ExportedProgram:
    """Trace `loss(model, batch)` on the model's device.

    Args:
        model: in the mode (train or eval) that is wanted.
        loss: of (model, batch).
        batch: tensors in dicts, lists or tuples.
        free: of "batch" and "sequence", those that stay symbols where the model's code allows it.
    """
    sizes = sizes_of(batch)
    order = iter(sizes.dims)

    def open_dims(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None
        dim = next(order)
        opened: dict[int, Any] = {0: Dim.AUTO} if "batch" in free and leaf.dim() else {}
        if dim is not None and "sequence" in free:
            opened[dim] = Dim.AUTO
        return opened

    shapes = (pytree.tree_map(open_dims, batch),)
    with torch.random.fork_rng(devices=[]):
        return torch.export.export(WithLoss(model, loss), (batch,), dynamic_shapes=shapes, strict=False)


@contextlib.contextmanager
def hand_written_backwards() -> Iterator[set[str]]:
    """Within, names of `autograd.Function`s that are applied: a trace goes through them and loses their backward."""
    names: set[str] = set()
    original = torch.autograd.Function.__dict__["apply"]

    def apply(kind: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not kind.__module__.startswith("torch."):  # those of checkpoints change no gradient
            names.add(kind.__name__)
        return original.__get__(None, kind)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield names
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def on_device_of(model: nn.Module, batch: Any) -> Any:
    """The batch where the model's parameters are."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)


def without_meta(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """A model on meta as a twin whose tensors say that they are on the CPU, still without memory.

    Forwards that make tensors of their own make them on the CPU, and torch takes the kernels of a CPU. Tied
    weights stay tied. A model with values is returned as it is, with the batch on its device.
    """
    if not any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        return model, on_device_of(model, batch)
    # Not of the documented API: torch.export takes the mode of tensors that it is given, and needs sizes as symbols.
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    twin, made = copy.deepcopy(model), {}
    for module in twin.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, x in table.items():
                if x is not None and x.is_meta:
                    if id(x) not in made:
                        with mode:
                            empty = torch.empty_like(x, device="cpu")
                        learned = isinstance(x, nn.Parameter)
                        made[id(x)] = nn.Parameter(empty, requires_grad=x.requires_grad) if learned else empty
                    table[name] = made[id(x)]
    return twin, pytree.tree_map(
        lambda x: torch.zeros_like(x, device="cpu") if isinstance(x, Tensor) else x, batch
    )
