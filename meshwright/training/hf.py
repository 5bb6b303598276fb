"""Models of Hugging Face transformers as what is trained here: the stock class, unmodified, and a loss (sum, count).

Owns the meeting of a found model (`hf_source.py`), its first values (`initialise.py`, `pretrained.py`) and its loss
(`models/hf_loss.py`). Must not know data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.hf_loss import HF_LOSSES
from meshwright.sharding.memory import Initialiser, give_memory
from meshwright.training.hf_source import HfSource, file_renaming, find_source
from meshwright.training.initialise import LeanBuild, materialise_buffers, reset_initialiser
from meshwright.training.pretrained import open_weights, pretrained_initialiser
from meshwright.training.step import Loss

Init = Literal["random", "pretrained", "pretrained_body"]


@dataclass(frozen=True)
class HfBuild(LeanBuild):
    """Builds one model; travels to workers as its few fields.

    Attributes:
        place: a folder with config.json, an id in the local cache, or a model type such as `llama`.
        init: random; pretrained: all weights from the files; pretrained_body: a new head where the files have none.
        task: see `HfSource`; None: the model's own.
        sizes: our names of sizes to values.
    """

    place: str
    init: Init = "random"
    task: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    def source(self) -> HfSource:
        """The configuration and class.

        Raises:
            ConfigError: as `find_source`; E121 where weights are wanted of a bare name.
        """
        source = find_source(self.place, task=self.task, sizes=self.sizes)
        if self.init != "random" and source.folder is None:
            raise ConfigError(
                "E121",
                f'model.init = "{self.init}": hf:{self.place} is the name of a model type and has no weights; give '
                f"a folder, or an id that lies in the local cache",
            )
        return source

    def skeleton(self) -> nn.Module:
        """The model on the meta device."""
        return self.source().build("meta")

    def __call__(self) -> nn.Module:
        """The model with all its values on the CPU; random ones follow torch's current seed."""
        model = self.skeleton()
        values = self.first_values(model, torch.initial_seed())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                flat = values(name, 0, parameter.numel(), parameter.dtype)
                give_memory(parameter, flat.view(parameter.shape))
        return model

    def first_values(self, model: nn.Module, seed: int) -> Initialiser:
        """Values of the parameters of `model`; its buffers get theirs.

        Raises:
            ConfigError: E111 for a module that cannot be reset, E121 for files of another model.
        """
        materialise_buffers(model, seed)
        if self.init == "random":
            return reset_initialiser(model, seed)
        folder = self.source().folder
        assert folder is not None, "weights were asked of a bare name"
        head = reset_initialiser(model, seed) if self.init == "pretrained_body" else None
        return pretrained_initialiser(
            model, open_weights(folder), place=self.place, rename=file_renaming(model), head=head
        )


def hf(place: str, *, init: Init = "random", task: str | None = None, **sizes: int) -> tuple[HfBuild, Loss]:
    """A model of transformers, and its loss, for `meshwright.verify` or `job.build`.

    Args:
        place: a folder with config.json, an id that lies in the local cache, or a model type such as `llama`.
        init: random, pretrained, or pretrained_body (a new head).
        task: causal_lm, masked_lm, sequence_classification or image_classification; None: the model's own.
        **sizes: num_layers, dim, num_heads, num_kv_heads, ffn_dim, vocab_size, max_seq_len.

    Returns:
        (build, loss): `build()` makes the model; `loss(model, batch)` is (sum, count).

    Raises:
        ConfigError: E115, E120, E121, E106 as the fields of a run file.
    """
    build = HfBuild(place, init, task, dict(sizes))
    return build, HF_LOSSES[build.source().task]
