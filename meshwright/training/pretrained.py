"""Weights that lie in safetensors files, read slice by slice as first values of a model without memory.

Owns the match of a file's names with a model's: tied weights, the body's prefix. Must not know the
engine: it answers (name, start, stop) with values, and of a file no more is read than the rows that hold them.
Source of the format: the safetensors README; of index files: `model.safetensors.index.json` as transformers writes it.
Simplification: a model whose files hold other tensors than its class (fused experts) is refused by name, not converted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from meshwright.checkpoint.compare import group_names
from meshwright.errors import ConfigError
from meshwright.sharding.memory import Initialiser

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 4


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a model's folder.

    Attributes:
        folder: where they lie.
        files: name of a tensor to its file.
    """

    folder: Path
    files: Mapping[str, str]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; reads a header only."""
        with self._open(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def read(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """The flat elements [start, stop) of a tensor as `dtype`, `(stop - start,)`; only rows that hold them are read.

        Raises:
            ConfigError: E121 where the file is damaged.
        """
        try:
            with self._open(name) as file:
                piece = file.get_slice(name)
                shape = piece.get_shape()
                if not shape:
                    return file.get_tensor(name).flatten()[start:stop].to(dtype)
                row = max(1, torch.Size(shape[1:]).numel())
                first, last = start // row, -(-stop // row)
                values = piece[first:last].flatten()
        except SafetensorError as error:
            raise ConfigError(
                "E121", f"{self.folder / self.files[name]}: {error}; fetch the file again"
            ) from error
        return values[start - first * row : stop - first * row].to(dtype)

    def _open(self, name: str) -> Any:
        return safe_open(self.folder / self.files[name], framework="pt")


def open_weights(folder: Path) -> WeightFiles:
    """The safetensors of a model's folder, one file or several with their index.

    Raises:
        ConfigError: E121 where there are none, or one that the index names is missing or damaged.
    """
    index = folder / _INDEX
    if (folder / _SINGLE).is_file():
        names = dict.fromkeys(_names_in(folder / _SINGLE), _SINGLE)
    elif index.is_file():
        names = dict(json.loads(index.read_text())["weight_map"])
        for file in sorted(set(names.values())):
            if not (folder / file).is_file():
                raise ConfigError(
                    "E121", f"{index} names {file}, which is not there; fetch the rest of the model"
                )
    else:
        found = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"; {found[0]} is pickled and never loaded: convert it to safetensors" if found else ""
        raise ConfigError(
            "E121",
            f'{folder} holds no {_SINGLE} and no {_INDEX}{hint}. Set model.init = "random", or fetch the weights.',
        )
    return WeightFiles(folder, names)


def _names_in(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise ConfigError("E121", f"{path}: {error}; fetch the file again") from error


def pretrained_initialiser(
    model: nn.Module,
    weights: WeightFiles,
    *,
    place: str,
    rename: Callable[[str], str] = str,
    head: Initialiser | None = None,
) -> Initialiser:
    """First values of the parameters of `model` from `weights`; its persistent buffers are read at once.

    Args:
        model: a transformers model without memory.
        weights: its files.
        place: for messages.
        rename: name in the files to the name that the class of today has for it.
        head: values of parameters outside the model's body that the files lack; None: they must not lack any.

    Raises:
        ConfigError: E121 where tensors are missing, left over or of another shape, each named in one pattern.
    """
    match = _Match(model, weights, rename)
    body = f"{match.prefix}."
    drawn = [name for name in match.missing if head is not None and not name.startswith(body)]
    missing = [name for name in match.missing if name not in drawn]
    _check(place, match, missing=missing, drawn=bool(drawn))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in match.found:
                values = weights.read(match.found[name], 0, buffer.numel(), buffer.dtype)
                buffer.copy_(values.view(buffer.shape))

    def initialiser(name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        if name in match.found:
            return weights.read(match.found[name], start, stop, dtype)
        assert head is not None, f"{name} has no value in the files"
        return head(name, start, stop, dtype)

    return initialiser


class _Match:
    """Which tensor of the files is which of the model.

    Attributes:
        prefix: the name of the model's body, e.g. `transformer`.
        found: name of a parameter or persistent buffer to the name in the files.
        missing: parameters that are not in the files.
        unexpected: tensors of the files that the model has no place for.
        misfits: name, shape in the files, shape in the model.
    """

    def __init__(self, model: nn.Module, weights: WeightFiles, rename: Callable[[str], str]) -> None:
        self.prefix = str(getattr(model, "base_model_prefix", ""))
        aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name)
        plain = {self._plain(rename(name)): name for name in weights.files}
        self.found: dict[str, str] = {}
        used: set[str] = set()
        targets: list[tuple[str, Tensor, list[str]]] = [
            (name, p, aliases[id(p)]) for name, p in model.named_parameters()
        ]
        persistent = model.state_dict(keep_vars=True)
        targets += [(name, b, [name]) for name, b in model.named_buffers() if name in persistent]
        self.missing: list[str] = []
        for name, tensor, names in targets:
            sources = [plain[key] for alias in names if (key := self._plain(alias)) in plain]
            used.update(sources)
            if sources:
                self.found[name] = sources[0]
            elif isinstance(tensor, nn.Parameter):
                self.missing.append(name)
        ignored = [
            re.compile(text) for text in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        ]
        left = [name for name in weights.files if name not in used]
        self.unexpected = [name for name in left if not any(pattern.search(name) for pattern in ignored)]
        shapes = [
            (name, weights.shape(self.found[name]), tuple(t.shape))
            for name, t, _ in targets
            if name in self.found
        ]
        self.misfits = [row for row in shapes if row[1] != row[2]]

    def _plain(self, name: str) -> str:
        """One name for what files of the whole model and of its body alone call differently."""
        return name.removeprefix(f"{self.prefix}.")


def _check(place: str, match: _Match, *, missing: list[str], drawn: bool) -> None:
    # A file of a model with another head: its head is left over, ours is drawn.
    body = [name for name in match.unexpected if not drawn or name.startswith(f"{match.prefix}.")]
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing: {_patterns(missing)}")
    if body:
        parts.append(f"{len(body)} without a place in the model: {_patterns(body)}")
    if match.misfits:
        by_shapes: dict[str, list[str]] = {}
        for name, saved, here in match.misfits:
            by_shapes.setdefault(f"{list(saved)}, model {list(here)}", []).append(name)
        rows = [f"{_patterns(names)} {shapes}" for shapes, names in by_shapes.items()]
        parts.append(f"{len(match.misfits)} of another shape: {'; '.join(rows[:_SHOWN])}")
    if not parts:
        return
    body_prefix = f"{match.prefix}."
    only_head = (
        missing and not body and not match.misfits and not any(n.startswith(body_prefix) for n in missing)
    )
    fix = (
        'Set model.init = "pretrained_body" to draw a new head'
        if only_head
        else "Set model.task and model.* sizes as the files have them, or take the files of this model"
    )
    raise ConfigError(
        "E121", f"the weights of hf:{place} are those of another model: {'. '.join(parts)}. {fix}."
    )


def _patterns(names: Iterable[str]) -> str:
    rows = group_names(names)
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return ", ".join(rows[:_SHOWN]) + more
