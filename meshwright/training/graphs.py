"""The task graph of what `model.source` names, without memory for its weights.

Owns the example batch of each kind of model. Must not know how graphs are made or shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshwright.capture.capture import capture
from meshwright.graph.task_graph import TaskGraph
from meshwright.models.build import build_model
from meshwright.models.hf_loss import HF_LOSSES
from meshwright.models.loss import classification_loss, language_model_loss
from meshwright.presets import find_model
from meshwright.training.hf import HfBuild
from meshwright.training.task import call_user


def graph_of(source: str, batch: int, sequence: int) -> TaskGraph:
    """The graph of a model with its loss, in training mode.

    Args:
        source: the name of a preset, or as `model.source`: `preset:`, `hf:` or `py:`.
        batch: samples; of a user's dataset, its first ones.
        sequence: positions of models of text.

    Raises:
        ConfigError: as for training: E104, E115, E120, E111; E130, E131 where it cannot be captured.
    """
    kind, _, place = source.partition(":")
    if kind == "hf":
        return _of_hf(place, batch, sequence)
    if kind == "py":
        model, loss, dataset = call_user(place)
        samples = [dataset[i % len(dataset)] for i in range(batch)]
        return capture(model.train(), loss, default_collate(samples))
    preset = find_model(place if kind == "preset" else source)
    with torch.device("meta"):
        model = build_model(preset.family, dataclasses.asdict(preset))
    if preset.family == "mlp":
        data: Mapping[str, Tensor] = {"inputs": torch.zeros(batch, preset.input_dim), "labels": _zeros(batch)}
        return capture(model, classification_loss, data, name=preset.name)
    data = {"tokens": _zeros(batch, sequence), "labels": _zeros(batch, sequence)}
    return capture(model, language_model_loss, data, name=preset.name)


def _of_hf(place: str, batch: int, sequence: int) -> TaskGraph:
    build = HfBuild(place, "random", None, {})
    source = build.source()
    model: nn.Module = build.skeleton().train()
    loss = HF_LOSSES[source.task]
    if source.task == "image_classification":
        side, channels = source.config.image_size, source.config.num_channels
        data = {"pixel_values": torch.zeros(batch, channels, side, side), "labels": _zeros(batch)}
        return capture(model, loss, data)
    labels = _zeros(batch) if source.task == "sequence_classification" else _zeros(batch, sequence)
    batch_of_text: dict[str, Any] = {"input_ids": _zeros(batch, sequence), "labels": labels}
    return capture(model, loss, batch_of_text)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)
