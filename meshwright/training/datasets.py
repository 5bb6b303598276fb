"""Which datasets a configuration means: by its model's task, its reader, and whether evaluation has data of its own.

Owns the choice. Must not know models but by their numbers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.data.batches import MapStyle
from meshwright.data.classified import ClassifiedImages, ClassifiedTexts, DigitImages
from meshwright.data.dataset import SequenceRule, check_tokenizer, open_data
from meshwright.data.identity import Split
from meshwright.data.masked import MaskedDataset
from meshwright.data.tokenizer import open_tokenizer
from meshwright.errors import ConfigError
from meshwright.training.config import RunConfig, default_cache_dir
from meshwright.training.hf_source import HfSource

Open = Callable[[str, Split], MapStyle]


def language_datasets(config: RunConfig, vocab_size: int | None) -> tuple[MapStyle, MapStyle | None]:
    """Sequences for training, and held-out ones (None where a `py:` dataset has none).

    Raises:
        ConfigError: E103, E105, E107, E108, E111, E115, E122.
    """
    return _both(config, _language(config, vocab_size))


def hf_datasets(config: RunConfig, source: HfSource) -> tuple[MapStyle, MapStyle | None]:
    """The samples that the task of `source` takes, and held-out ones.

    Raises:
        ConfigError: as `language_datasets`; E108 for a reader that cannot give such samples.
    """
    openers: dict[str, Callable[[RunConfig, HfSource], Open]] = {
        "causal_lm": lambda config, source: _language(config, source.size("vocab_size")),
        "masked_lm": _masked,
        "sequence_classification": _texts,
        "image_classification": _images,
    }
    return _both(config, openers[source.task](config, source))


def _both(config: RunConfig, open_one: Open) -> tuple[MapStyle, MapStyle | None]:
    def opened(spec: str, split: Split) -> MapStyle | None:
        if not spec.startswith("py:"):
            return open_one(spec, split)
        return None if split == "heldout" else _user_dataset(spec.removeprefix("py:"))

    train = opened(config.data.train, "train")
    assert train is not None, "the train split of a reader is a dataset"
    if config.data.eval is None:
        return train, opened(config.data.train, "heldout")
    return train, opened(config.data.eval, "all")


def _cache_dir(config: RunConfig) -> Path:
    return (config.data.cache_dir or default_cache_dir()).expanduser()


def _language(config: RunConfig, vocab_size: int | None) -> Open:
    data = config.data
    rule = SequenceRule(
        seq_len=data.seq_len,
        vocab_size=vocab_size,
        packing=data.packing,
        overlong=data.overlong,
        encoder=open_tokenizer(data.tokenizer),
    )
    return lambda spec, split: open_data(spec, split=split, sequences=rule, cache_dir=_cache_dir(config))


def _masked(config: RunConfig, source: HfSource) -> Open:
    encoder, vocab_size = open_tokenizer(config.data.tokenizer), source.size("vocab_size")
    assert vocab_size is not None, "a masked language model has a vocabulary"
    mask = encoder.mask
    if mask is None:
        raise ConfigError(
            "E122",
            f'data.tokenizer = "{config.data.tokenizer}" has no [MASK] or <mask>, which a masked model needs',
        )
    if mask >= vocab_size:
        raise ConfigError(
            "E103",
            f"the mask is id {mask}, the model's vocabulary is {vocab_size:,}. Set model.vocab_size={mask + 1}.",
        )
    language = _language(config, vocab_size)
    return lambda spec, split: MaskedDataset(
        language(spec, split), mask=mask, vocab_size=vocab_size, seed=config.train.seed
    )


def _texts(config: RunConfig, source: HfSource) -> Open:
    encoder = open_tokenizer(config.data.tokenizer)
    check_tokenizer(encoder, source.size("vocab_size"))
    pad = source.config.pad_token_id
    if pad is None:
        raise ConfigError(
            "E120",
            f"hf:{source.place} has no pad_token_id, which tells where a text ends; set it in config.json",
        )

    def open_one(spec: str, split: Split) -> MapStyle:
        return ClassifiedTexts(
            _table(spec, "sequence_classification"),
            split,
            encoder=encoder,
            seq_len=config.data.seq_len,
            pad=pad,
            num_classes=source.config.num_labels,
        )

    return open_one


def _images(config: RunConfig, source: HfSource) -> Open:
    side = source.config.image_size
    numbers = {
        "channels": source.config.num_channels,
        "side": side if isinstance(side, int) else side[0],
        "num_classes": source.config.num_labels,
    }

    def open_one(spec: str, split: Split) -> MapStyle:
        if spec == "digits":
            return DigitImages(split, **numbers)
        return ClassifiedImages(_table(spec, "image_classification", "digits, "), split, **numbers)

    return open_one


def _table(spec: str, task: str, others: str = "") -> str:
    if not spec.startswith("hf:"):
        raise ConfigError(
            "E108",
            f"task {task} cannot read data.train = {spec!r}; use {others}hf:PATH_OR_ID or py:MODULE:FUNCTION",
        )
    return spec.removeprefix("hf:")


def _user_dataset(place: str) -> MapStyle:
    dataset = import_function(place, key="data.train")()
    check_dataset(dataset, f"py:{place} must return a dataset; what it returned")
    return dataset


def import_function(place: str, *, key: str) -> Callable[[], Any]:
    """The function `MODULE:FUNCTION`, looked for in the working directory too.

    Raises:
        ConfigError: E111 where it is not there.
    """
    module_name, _, function_name = place.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "E111", f"{key} = 'py:{place}': {error}. Looked in {here} and the installed packages."
        ) from error
    return function


def check_dataset(dataset: Any, subject: str) -> None:
    """Raise E111 for what is not map style, E105 for what is empty; `subject` starts the sentence."""
    if not callable(getattr(dataset, "__getitem__", None)) or not callable(getattr(dataset, "__len__", None)):
        raise ConfigError("E111", f"{subject} has no __len__ and __getitem__ (map style)")
    if len(dataset) == 0:
        raise ConfigError("E105", f"{subject} is empty")
