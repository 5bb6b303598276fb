"""The plain state dict of a sharded model: gathered a tensor at a time, and loaded into pieces.

Owns names and values as `nn.Module.state_dict` has them, in the type of the masters. Files are `checkpoint/`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from meshwright.checkpoint.writer import Item
from meshwright.comm import ops
from meshwright.errors import CheckpointError
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.saving import aliases_of, items_to_save, owned_pieces, runs_of, whole_shapes
from meshwright.training.state import TrainState


def stream_state(state: TrainState) -> Iterator[tuple[str, Tensor | None]]:
    """Every parameter and persistent buffer, whole, in the module's order; None on all ranks but the first.

    Every rank must iterate to the end. No rank holds more than one whole tensor at a time.
    """
    engine, everyone = state.engine, state.engine.groups.everyone
    pieces: dict[str, list[Item]] = {}
    for item in items_to_save(state):
        if item.kind in ("parameter", "buffer"):
            pieces.setdefault(item.name, []).append(item)
    same, shapes = aliases_of(engine), whole_shapes(engine)
    dtypes = {owned.name: owned.values.dtype for owned in owned_pieces(engine)}
    for name, in_module in _entries(engine).items():
        first = same.get(name, name)
        dtype = in_module if engine.whole is not None else dtypes.get(first, in_module)
        whole = torch.zeros(math.prod(shapes[first]), dtype=dtype, device=engine.device)
        for item in pieces.get(first, []):
            place = item.place_of(whole)
            place.copy_(item.values.view(place.shape))
        # As bytes: each comes from one rank, and zeros of the others keep every bit of it, signs of zeros too.
        ops.reduce(whole.view(torch.uint8), everyone, index=0, cause=f"state of {name}").wait()
        yield name, whole.view(shapes[first]).cpu() if everyone.index == 0 else None


def load_plain_state(engine: ShardingEngine, values: Mapping[str, Tensor]) -> None:
    """Put a plain state dict into this rank's pieces; every rank has all of it, and calls.

    Raises:
        CheckpointError: E501 where names or shapes are not the model's.
    """
    same, shapes = aliases_of(engine), whole_shapes(engine)
    wanted = {name: shapes[same.get(name, name)] for name in _entries(engine)}
    given = {name: tuple(value.shape) for name, value in values.items()}
    wrong = [name for name in wanted if given.get(name) != wanted[name]] + [
        n for n in given if n not in wanted
    ]
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            "E501",
            f"the state dict is of another model: {len(wrong)} of {len(wanted)} tensors differ, e.g. {name!r}: given "
            f"{given.get(name, 'not')}, the model has {wanted.get(name, 'none')}.",
        )
    with torch.no_grad():
        for owned in owned_pieces(engine):
            flat = values[owned.name].reshape(-1)
            parts = [flat[first : first + high - low] for first, low, high in runs_of(engine, owned)]
            if parts:
                owned.values.copy_(torch.cat(parts).view(owned.values.shape))
        engine.publish_masters()


def _entries(engine: ShardingEngine) -> Mapping[str, torch.dtype]:
    """Names in the state dict of the module, with all its stages, and their types in the module."""
    if engine.whole is not None:
        return engine.whole.dtypes
    return {name: tensor.dtype for name, tensor in engine.model.state_dict(keep_vars=True).items()}
