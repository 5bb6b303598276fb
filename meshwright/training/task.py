"""What is trained, made from a configuration: a model, a loss and data, on every rank alike.

Our own models are built on the meta device and drawn shard by shard from (seed, parameter name, global index). A
user's module is built by its own function under one seed on every rank, and the ranks check that they built the same;
built on the meta device, it is reset module by module (`initialise.py`).
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshwright.comm import ops
from meshwright.comm.ops import Group
from meshwright.data.batches import MapStyle
from meshwright.errors import ConfigError, PlanError
from meshwright.models.build import build_model
from meshwright.models.hf_loss import HF_LOSSES
from meshwright.models.initial import KnowsInitialValues, draw
from meshwright.models.loss import classification_loss, language_model_loss
from meshwright.presets import ModelPreset, find_model, matmul_flops_per_token
from meshwright.sharding.memory import Initialiser
from meshwright.training.config import RunConfig
from meshwright.training.datasets import check_dataset, hf_datasets, import_function, language_datasets
from meshwright.training.flops import (
    FlopsPerSample,
    count_flops,
    count_flops_by_graph,
    count_flops_without_memory,
)
from meshwright.training.hf import HfBuild
from meshwright.training.initialise import materialise_buffers, reset_initialiser
from meshwright.training.normaliser import sum_and_count
from meshwright.training.precision import check_runs, to_master
from meshwright.training.step import Loss

_NUM_PROBES = 32


@dataclass(frozen=True)
class Task:
    """A model, its loss and its data.

    Attributes:
        name: for the run header.
        model: on the meta device where `initialiser` draws it, else with values.
        loss: (model, batch) -> (sum, count).
        train_data: map-style dataset.
        heldout_data: the same, disjoint; None where there is none.
        initialiser: values of meta parameters.
        flops: FLOPs of forward and backward of one sample.
        shape: extents of an activation that parallelism can cut: layer, batch is the plan's, sequence, channel.
    """

    name: str
    model: nn.Module
    loss: Loss
    train_data: MapStyle
    heldout_data: MapStyle | None
    initialiser: Initialiser | None
    flops: FlopsPerSample
    shape: dict[str, int]


def make_task(config: RunConfig) -> Task:
    """The task that `config` describes, with parameters in the type of their masters.

    Raises:
        ConfigError: E104, E106 (preset), E120, E121, E106 (hf), E105, E108, E103 (data), E111, E112 (a user's module).
        PlanError: E212 for a user's module that cannot have the plan's precision.
    """
    kind, _, rest = config.model.source.partition(":")
    make = {"preset": _preset_task, "hf": _hf_task, "py": _user_task}[kind]
    task = make(config, rest)
    to_master(task.model, config.plan.precision)
    return task


def _preset(config: RunConfig, name: str) -> ModelPreset:
    preset = find_model(name)
    fields = {field.name for field in dataclasses.fields(ModelPreset)}
    changes = {
        key: value
        for key, value in config.model.model_dump(exclude={"source", "init", "task"}).items()
        if value is not None and key in fields
    }
    return preset.with_changes(**changes) if changes else preset


def model_numbers(config: RunConfig) -> dict[str, int]:
    """The sizes of a preset that keys of `model` may change, by key; empty for a user's module."""
    kind, _, name = config.model.source.partition(":")
    if kind != "preset":
        return {}
    sizes = dataclasses.asdict(_preset(config, name))
    return {key: sizes[key] for key in type(config.model).model_fields if key in sizes and key != "source"}


def _preset_task(config: RunConfig, name: str) -> Task:
    preset = _preset(config, name)
    is_language = preset.family != "mlp"
    if is_language and config.data.seq_len > preset.max_seq_len:
        raise ConfigError(
            "E106",
            f"data.seq_len = {config.data.seq_len} exceeds the {preset.max_seq_len} positions of {preset.name}. "
            f"Set data.seq_len <= {preset.max_seq_len}, or model.max_seq_len={config.data.seq_len}.",
        )
    if is_language == (config.data.train == "digits"):
        wanted = "stdlib, text:, jsonl:, nanogpt:, parquet:, megatron: or hf:" if is_language else "digits"
        raise ConfigError(
            "E108", f"model {preset.name} cannot read data.train = {config.data.train!r}; use {wanted}."
        )
    try:
        with torch.device("meta"):
            model = build_model(preset.family, dataclasses.asdict(preset))
    except ValueError as error:
        raise ConfigError("E106", f"model {preset.name}: {error}") from error
    initial = cast(KnowsInitialValues, model).initial_values()
    seed = config.train.seed

    def initialiser(name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return draw(initial[name], seed=seed, name=name, start=start, stop=stop, dtype=dtype)

    train, heldout = language_datasets(config, preset.vocab_size if is_language else None)
    tokens = config.data.seq_len if is_language else 1
    full = tokens * matmul_flops_per_token(preset, tokens, causal=False)
    causal = tokens * matmul_flops_per_token(preset, tokens, causal=True) if preset.causal else full
    return Task(
        name=preset.name,
        model=model,
        loss=language_model_loss if is_language else classification_loss,
        train_data=train,
        heldout_data=heldout,
        initialiser=initialiser,
        flops=FlopsPerSample(full, causal),
        shape={"layer": preset.num_layers, "sequence": tokens, "channel": preset.dim},
    )


def _hf_task(config: RunConfig, place: str) -> Task:
    chosen = config.model
    sizes = chosen.model_dump(exclude={"source", "init", "task"}, exclude_none=True)
    build = HfBuild(place, chosen.init, chosen.task, sizes)
    source = build.source()
    positions = source.size("max_seq_len") if source.task != "image_classification" else None
    if positions is not None and config.data.seq_len > positions:
        raise ConfigError(
            "E106",
            f"data.seq_len = {config.data.seq_len} exceeds the {positions} positions of hf:{place}. "
            f"Set data.seq_len <= {positions}, or model.max_seq_len={config.data.seq_len}.",
        )
    train, heldout = hf_datasets(config, source)
    model = to_master(build.skeleton(), config.plan.precision)
    loss = HF_LOSSES[source.task]
    extents = {"layer": source.size("num_layers"), "channel": source.size("dim")}
    if source.task in ("causal_lm", "masked_lm"):
        extents["sequence"] = config.data.seq_len
    return Task(
        name=f"{type(model).__name__} hf:{place}",
        model=model,
        loss=loss,
        train_data=train,
        heldout_data=heldout,
        initialiser=build.first_values(model, config.train.seed),
        flops=count_flops_without_memory(build.skeleton, loss, train[0]),
        shape={axis: size for axis, size in extents.items() if size is not None},
    )


def _user_task(config: RunConfig, place: str) -> Task:
    torch.manual_seed(config.train.seed)
    model, loss, dataset = call_user(place)
    # Spread over the dataset: the first samples may not be like the others (sorted labels, no padding).
    indices = {i * len(dataset) // _NUM_PROBES for i in range(_NUM_PROBES)}
    probe = [dataset[i] for i in sorted(indices)]
    to_master(model, config.plan.precision)
    materialise_buffers(model, config.train.seed)
    initialiser = reset_initialiser(model, config.train.seed)
    if any(parameter.is_meta for parameter in model.parameters()):
        flops = count_flops_by_graph(model, loss, probe[:2]) or FlopsPerSample(0.0, 0.0)
        loss = _declared_pair(loss, place)
    else:
        loss, flops = sum_and_count(model, loss, probe), count_flops(model, loss, probe[:1])
        check_runs(model, loss, probe[:2], precision=config.plan.precision)
    return Task(
        name=f"py:{place}",
        model=model,
        loss=loss,
        train_data=dataset,
        heldout_data=None,
        initialiser=initialiser,
        flops=flops,
        shape={},
    )


def _declared_pair(loss: Callable[[Any, Any], Any], place: str) -> Loss:
    """A model without memory cannot be probed: its loss must return the pair, and is checked at each call."""

    def checked(model: Any, batch: Any) -> tuple[Tensor, Any]:
        value = loss(model, batch)
        if not isinstance(value, tuple) or len(value) != 2:
            raise ConfigError(
                "E112",
                f"py:{place} builds its model on the meta device, so a bare scalar loss cannot be tested to be a "
                f"mean; return (sum, count)",
            )
        return value

    return checked


def call_user(place: str) -> tuple[nn.Module, Callable[[Any, Any], Any], Any]:
    """What the function `MODULE:FUNCTION` returns: (model, loss, dataset); E111 unless it is that."""
    value = import_function(place, key="model.source")()
    rule = f"py:{place} must return (model, loss_fn, dataset)"
    if not isinstance(value, tuple) or len(value) != 3:
        raise ConfigError("E111", f"{rule}; it returned {type(value).__name__}")
    model, loss, dataset = value
    if not isinstance(model, nn.Module) or not callable(loss):
        raise ConfigError("E111", f"{rule}; it returned ({type(model).__name__}, {type(loss).__name__}, ...)")
    check_dataset(dataset, f"{rule}; its dataset")
    return model, loss, dataset


def check_same_model(model: nn.Module, group: Group, *, device: torch.device | None = None) -> None:
    """Raise E113 unless every rank of `group` built bitwise the same parameters and buffers.

    Values of meta parameters are drawn by a function of their name and index: only their shapes are compared.

    Args:
        model: before it is sharded.
        group: the ranks that must agree.
        device: where the group's tensors live; None: on the CPU.
    """
    digest = 0
    for name, tensor in _named_tensors(model):
        digest = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), digest)
        if not tensor.is_meta:
            digest = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), digest)
    value = float(digest & 0xFFFFF)
    sums = torch.tensor([value, value * value], dtype=torch.float64, device=device)
    ops.all_reduce(sums, group, cause="same model").wait()
    total, squares = (int(x) for x in sums.tolist())
    if group.size * squares != total * total:
        raise PlanError(
            "E113",
            f"ranks of {group.axis} built different models (rank {group.log.rank}: digest {int(value):#x}). Build it "
            f"from torch's seeded generator only: no time, process id, hash() of strings or rank in its values.",
        )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
