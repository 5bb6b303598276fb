"""The plain state dict of a sharded model: gathered a tensor at a time, and loaded into pieces.

Owns names and values as `nn.Module.state_dict` has them, in the type of the masters. Files are `checkpoint/`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from meshwright.comm import ops
from meshwright.errors import CheckpointError
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.saving import aliases, items_to_save, owned_pieces
from meshwright.training.state import TrainState


def stream_state(state: TrainState) -> Iterator[tuple[str, Tensor | None]]:
    """Every parameter and persistent buffer, whole, in the module's order; None on all ranks but the first.

    Every rank must iterate to the end. No rank holds more than one whole tensor at a time.
    """
    engine = state.engine
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for item in items_to_save(state):
        if item.kind in ("parameter", "buffer"):
            pieces.setdefault(item.name, []).append((item.start, item.values))
    same = aliases(engine.model)
    dtypes = {owned.name: owned.values.dtype for owned in owned_pieces(engine)}
    for name, tensor in engine.model.state_dict(keep_vars=True).items():
        first = same.get(name, name)
        dtype = dtypes.get(first, tensor.dtype)
        whole = torch.zeros(tensor.numel(), dtype=dtype, device=engine.device)
        for start, values in pieces.get(first, []):
            whole[start : start + values.numel()] = values
        # As bytes: each comes from one rank, and zeros of the others keep every bit of it, signs of zeros too.
        ops.reduce(whole.view(torch.uint8), engine.group, index=0, cause=f"state of {name}").wait()
        yield name, whole.view(tensor.shape).cpu() if engine.group.index == 0 else None


def load_plain_state(engine: ShardingEngine, values: Mapping[str, Tensor]) -> None:
    """Put a plain state dict into this rank's pieces; every rank has all of it, and calls.

    Raises:
        CheckpointError: E501 where names or shapes are not the model's.
    """
    wanted = {name: tuple(t.shape) for name, t in engine.model.state_dict(keep_vars=True).items()}
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
            flat = values[owned.name].reshape(-1)[owned.start : owned.start + owned.values.numel()]
            owned.values.copy_(flat.view(owned.values.shape))
        engine.publish_masters()
