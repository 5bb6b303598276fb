"""Between a run's state and checkpoints: which flat pieces this rank writes, and where loaded ones go.

Owns what belongs to a checkpoint: parameters as the optimizer holds them, optimizer state by parameter, persistent
buffers, states of generators, and the few numbers of `TrainState`. Must not know files or the order of saves. What
several ranks hold alike is written once, spread over data-parallel ranks by elements. Of a model that is cut over tp,
each rank writes and reads the intervals of the whole that its part is; what tp ranks hold alike is the first one's.

Simplification: buffers that a model does not count as its state (`persistent=False`) are left to its constructor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.checkpoint.manifest import Kind, LogicalTensor, RunFacts
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.writer import Item
from meshwright.comm import ops
from meshwright.comm.ops import DataGroups
from meshwright.errors import CheckpointError
from meshwright.layout.stripes import Run
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.sharding.engine import ShardingEngine, ShardParameter, WholeModel
from meshwright.training.state import TrainState


@dataclass(frozen=True)
class Owned:
    """Flat elements [start, start + values.numel()) of a parameter or buffer on this rank.

    Attributes:
        kind: what it is.
        name: of the whole tensor.
        shape: of the whole tensor, or of this rank's part over tp, which `start` counts in.
        start: first flat element.
        values: the memory itself, 1-D where it is a piece.
        shard: what the optimizer sees of it, if it is trained.
    """

    kind: Kind
    name: str
    shape: tuple[int, ...]
    start: int
    values: Tensor
    shard: ShardParameter | None = None


def items_to_save(state: TrainState, groups: DataGroups | None = None) -> list[Item]:
    """What this rank writes.

    `groups`: workers and servers of an asynchronous run, where the state is of a rank alone and what its optimizer
    updates is its part.
    """
    engine, layout = state.engine, state.engine.tensor_layout
    items = []
    held = [owned for owned in _sharded(engine, _shards(state, groups)) if _writes(engine, owned)]
    for owned, first, last in _share(held, *engine.replica):
        items += _items(layout, owned, first, last)
        if owned.shard is not None:
            found = state.optimizer.state_of(owned.shard)
            items += _state_items(layout, owned.shard, found, first, last)
    groups = groups or engine.groups
    if not groups.is_server:  # its buffers saw no sample
        held = [owned for owned in _replicated(engine) if _writes(engine, owned)]
        for part in _share(held, groups.workers.index, groups.workers.size):
            items += _items(layout, *part)
    return items + _generator_items(engine)


def _writes(engine: ShardingEngine, owned: Owned) -> bool:
    """Whether this rank of those that hold parts of one copy writes a tensor."""
    return _counts(engine, owned.name)


def _counts(engine: ShardingEngine, name: str) -> bool:
    layout = engine.tensor_layout
    return (layout is None or layout.counts(name)) and name not in engine.counted_elsewhere


def expected_tensors(engine: ShardingEngine) -> list[tuple[Kind, str, tuple[int, ...]]]:
    """Kind, name and shape of every parameter and persistent buffer of the model, of all its stages."""
    if engine.whole is not None:
        found: list[tuple[Kind, str, tuple[int, ...]]] = [
            ("parameter", name, shape) for name, shape in engine.whole.parameters.items()
        ]
        return found + [("buffer", name, shape) for name, shape in engine.whole.buffers.items()]
    wanted: list[tuple[Kind, str, tuple[int, ...]]] = [
        ("parameter", name, _whole_shape(engine.tensor_layout, name, tuple(parameter.shape)))
        for name, parameter in engine.model.named_parameters()
    ]
    return wanted + [("buffer", name, tuple(buffer.shape)) for name, buffer in _buffers(engine.model)]


def whole_shapes(engine: ShardingEngine) -> dict[str, tuple[int, ...]]:
    """Shape of every whole parameter and persistent buffer, by name."""
    return {name: shape for _, name, shape in expected_tensors(engine)}


def whole_model(model: nn.Module) -> WholeModel:
    """What a model has before it is cut over ranks of a pipeline; not over tp yet either."""
    return WholeModel(
        {name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        {name: tuple(buffer.shape) for name, buffer in _buffers(model)},
        frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad),
        aliases(model),
        {name: value.dtype for name, value in model.state_dict(keep_vars=True).items()},
    )


def aliases_of(engine: ShardingEngine) -> dict[str, str]:
    """As `aliases`, of all stages."""
    return aliases(engine.model) if engine.whole is None else dict(engine.whole.aliases)


def aliases(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters to the name under which they are saved."""
    first: dict[nn.Parameter, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            found[name] = first[parameter]
    return found


def owned_pieces(engine: ShardingEngine) -> list[Owned]:
    """Everything this rank holds of the model, copies that other ranks hold too included."""
    return [*_sharded(engine, engine.shards), *_replicated(engine)]


def runs_of(engine: ShardingEngine, owned: Owned) -> list[Run]:
    """Where the elements of a piece are in the whole tensor, in their order."""
    stop = owned.start + owned.values.numel()
    return _runs(engine.tensor_layout, owned.name, owned.shape, owned.start, stop)


def _shards(state: TrainState, groups: DataGroups | None) -> Sequence[ShardParameter]:
    """What counts of this rank's pieces; see `items_to_save`."""
    return state.engine.shards if groups is None else state.optimizer.shards


def _sharded(engine: ShardingEngine, shards: Sequence[ShardParameter]) -> list[Owned]:
    """Pieces of parameters in buckets: the trained ones, and frozen ones where weights are sharded."""
    owned = [
        Owned(
            "parameter", shard.name, shard.shape, shard.piece.start, shard.parameter.detach().view(-1), shard
        )
        for shard in shards
    ]
    for memory in engine.memories:
        if memory.bucket.trainable:
            continue
        shapes = {spec.name: spec.shape for spec in memory.bucket.parameters}
        for piece in memory.pieces():
            values = memory.weight_shard[piece.offset : piece.offset + piece.stop - piece.start]
            owned.append(Owned("parameter", piece.name, shapes[piece.name], piece.start, values))
    return owned


def _replicated(engine: ShardingEngine) -> list[Owned]:
    """What every rank holds whole: parameters of no bucket, and buffers."""
    bucketed = {parameter for memory in engine.memories for parameter in memory.parameters}
    named: list[tuple[Kind, str, Tensor]] = [
        ("parameter", name, parameter.detach())
        for name, parameter in engine.model.named_parameters()
        if parameter not in bucketed
    ]
    named += [("buffer", name, buffer.detach()) for name, buffer in _buffers(engine.model)]
    return [Owned(kind, name, tuple(values.shape), 0, values) for kind, name, values in named]


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved:
            yield name, buffer


def _share(owned: Sequence[Owned], index: int, count: int) -> Iterator[tuple[Owned, int, int]]:
    """Of pieces that `count` ranks hold alike, the elements [first, last) that rank number `index` writes."""
    total = sum(item.values.numel() for item in owned)
    low, high = index * total // count, (index + 1) * total // count
    position = 0
    for item in owned:
        first, last = max(low - position, 0), min(high - position, item.values.numel())
        position += item.values.numel()
        if first < last:
            yield item, item.start + first, item.start + last


def _whole_shape(layout: TensorLayout | None, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if layout is None else layout.logical_shape(name, shape)


def _runs(layout: TensorLayout | None, name: str, shape: tuple[int, ...], start: int, stop: int) -> list[Run]:
    """Where flat elements [start, stop) of a rank's part are in the whole tensor."""
    if layout is None:
        return [(start, start, stop)]
    return list(layout.runs(name, shape, start, stop))


def _items(layout: TensorLayout | None, owned: Owned, first: int, last: int) -> list[Item]:
    values = owned.values.reshape(-1)[first - owned.start : last - owned.start]
    return _striped(layout, Item(owned.kind, owned.name, "", owned.shape, first, values))


def _striped(layout: TensorLayout | None, item: Item) -> list[Item]:
    """An item of a rank's part as items of the whole."""
    if layout is None:
        return [item]
    shape = layout.logical_shape(item.name, item.shape)
    stop, flat = item.start + item.values.numel(), item.values.contiguous()
    items = []
    for stripe in layout.stripes(item.name, item.shape, item.start, stop):
        size, stride = (stripe.count, stripe.length), (stripe.local_stride, 1)
        values = flat.as_strided(size, stride, flat.storage_offset() + stripe.offset).reshape(-1)
        runs = (stripe.length, stripe.stride) if stripe.count > 1 else (0, 0)
        items.append(Item(item.kind, item.name, item.slot, shape, stripe.start, values, *runs))
    return items


def _state_items(
    layout: TensorLayout | None, shard: ShardParameter, state: dict[str, Tensor], first: int, last: int
) -> Iterator[Item]:
    """Optimizer state of elements [first, last); what is one for the parameter goes with its first element."""
    piece = shard.piece
    for slot, value in state.items():
        flat = value.detach().reshape(-1)
        if value.dim() and flat.numel() == piece.stop - piece.start:
            part = flat[first - piece.start : last - piece.start]
            yield from _striped(layout, Item("optimizer", shard.name, slot, _state_shape(shard), first, part))
        elif first == 0 and (layout is None or layout.index == 0):
            yield Item("optimizer", shard.name, slot, tuple(value.shape), 0, flat)


def _state_shape(shard: ShardParameter) -> tuple[int, ...]:
    """Shape of state that lies as the parameter does; never (), which is one number for all of it."""
    return shard.shape or (1,)


def _generator_items(engine: ShardingEngine) -> list[Item]:
    return [
        Item("generator", name, "", tuple(value.shape), 0, value)
        for name, value in _generator_states(engine).items()
    ]


def _generator_states(engine: ShardingEngine) -> dict[str, Tensor]:
    rank = engine.group.log.rank
    states = {f"{rank} cpu": torch.get_rng_state()}
    if engine.device.type == "cuda":
        states[f"{rank} cuda"] = torch.cuda.get_rng_state(engine.device)
    return states


def load_items(state: TrainState, reader: CheckpointReader, groups: DataGroups | None = None) -> None:
    """Put a checkpoint into this rank's memory: only the intervals that it owns are read.

    The model has been checked to be the same (`checkpoint/compare.py`). Collective: weights that ranks hold beyond
    their shards are gathered, and loaded optimizer state is counted. `groups`: see `items_to_save`.

    Raises:
        CheckpointError: E502 for a damaged file, E505 for optimizer state that nobody takes.
    """
    engine = state.engine
    _check_optimizer(state, reader)
    with torch.no_grad():
        for owned in owned_pieces(engine):
            _fill(owned.values, reader, reader.model_tensor(owned.name), runs_of(engine, owned))
        count = 0
        for shard in _shards(state, groups):
            loaded = _load_state(state, shard, reader)
            count += loaded if _counts(engine, shard.name) else 0
        engine.publish_masters()
    share = count / engine.replica[1]  # the ranks that hold the same pieces each count them
    numbers = torch.tensor([share], dtype=torch.float64, device=engine.device)
    ops.all_reduce(numbers, (groups or engine.groups).everyone, cause="count optimizer state").wait()
    stored = sum(
        tensor.numel for tensors in reader.manifest.optimizer.values() for tensor in tensors if tensor.shape
    )
    found = round(numbers.item())
    assert found == stored, f"{found:,} elements of optimizer state were loaded of {stored:,}"


def state_numbers(state: TrainState) -> dict[str, float]:
    """Numbers of the state beside step and tokens, for the manifest."""
    scale = {} if state.loss_scale is None else state.loss_scale.to_numbers()
    return {"expected_count": state.expected_count, **scale}


def load_numbers(state: TrainState, run: RunFacts) -> None:
    """Put back step, tokens and the numbers of `state_numbers` that the checkpoint has."""
    state.step, state.tokens = run.step, run.tokens
    state.expected_count = run.state.get("expected_count", state.expected_count)
    if state.loss_scale is not None:
        state.loss_scale = state.loss_scale.with_numbers(run.state)


def _check_optimizer(state: TrainState, reader: CheckpointReader) -> None:
    """E505 where saved optimizer state would be dropped: it must never be lost in silence."""
    trained = {
        name
        for memory in state.engine.memories
        if memory.bucket.trainable
        for name in (spec.name for spec in memory.bucket.parameters)
    }
    if state.engine.whole is not None:
        trained = set(state.engine.whole.trained)
    lost = [name for name in reader.manifest.optimizer if name not in trained]
    if lost:
        raise CheckpointError(
            "E505",
            f"{reader.path} holds optimizer state of {len(lost)} parameters that are not trained now, e.g. "
            f"{lost[0]!r}. Train them again, or export the weights and import them as a new start: meshwright ckpt "
            f"export, meshwright ckpt import.",
        )


def _fill(values: Tensor, reader: CheckpointReader, tensor: LogicalTensor, runs: Sequence[Run]) -> None:
    """Read runs of the whole, which lie one after another in `values`."""
    first = runs[0][1] if runs else 0
    places = [(start, low - first, high - first) for start, low, high in runs]
    if values.is_contiguous():
        reader.read_runs_into(tensor, values.view(-1), places)
        return
    flat = torch.empty(values.numel(), dtype=values.dtype)
    reader.read_runs_into(tensor, flat, places)
    values.copy_(flat.view(values.shape))


def _load_state(state: TrainState, shard: ShardParameter, reader: CheckpointReader) -> int:
    """Load the state of one piece; the number of elements, numbers of whole parameters left out."""
    layout, piece = state.engine.tensor_layout, shard.piece
    loaded, count = {}, 0
    for tensor in reader.manifest.optimizer.get(shard.name, ()):
        dtype = getattr(torch, tensor.dtype)
        if tensor.shape == _whole_shape(layout, shard.name, _state_shape(shard)):
            value = torch.empty_like(shard.parameter, dtype=_state_dtype(dtype, shard.parameter))
            runs = _runs(layout, shard.name, _state_shape(shard), piece.start, piece.stop)
            _fill(value, reader, tensor, runs)
            count += value.numel()
        else:
            value = torch.empty(tensor.shape, dtype=dtype, device=shard.parameter.device)
            reader.read_into(tensor, value.view(-1))
            count += value.numel() if tensor.shape else 0
        loaded[tensor.slot] = value
    if loaded:
        state.optimizer.load_state(shard, loaded)
    return count


def _state_dtype(saved: torch.dtype, parameter: Tensor) -> torch.dtype:
    """Moments follow the parameter's type, as torch makes them; other types stay."""
    return parameter.dtype if saved.is_floating_point else saved


def load_generators(engine: ShardingEngine, reader: CheckpointReader) -> bool:
    """Put back the generators of this rank; whether the checkpoint has them for just these ranks."""
    manifest = reader.manifest
    if manifest.world_size != engine.groups.everyone.size or not manifest.generators:
        return False
    for name, now in _generator_states(engine).items():
        saved = manifest.generators.get(name)
        if saved is None:
            return False
        reader.read_into(saved, now)
        if name.endswith("cuda"):
            torch.cuda.set_rng_state(now, engine.device)
        else:
            torch.set_rng_state(now)
    return True
