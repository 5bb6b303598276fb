"""Every task of an hf: model gets samples from every reader that can give them, and learns from them."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.utils.data import default_collate

from meshwright.errors import ConfigError
from meshwright.training.config import load_config
from meshwright.training.task import make_task
from meshwright.verification.subject import materialise

SMALL = ["model.num_layers=1", "model.dim=32", "model.num_heads=2", "model.ffn_dim=64"]
WORDS = ["good nice fine", "bad poor sad", "odd new"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The library with caches of its own, and a table of texts and one of images."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    labels = [index % 3 for index in range(90)]
    texts = [f"{WORDS[label]} {index}" for index, label in enumerate(labels)]
    datasets.Dataset.from_dict({"sentence": texts, "label": labels}).save_to_disk(tmp_path / "texts")
    image = pytest.importorskip("PIL.Image")
    images = [image.new("L", (5 + index % 3, 7), color=80 * label) for index, label in enumerate(labels)]
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(3)})
    datasets.Dataset.from_dict({"img": images, "label": labels}, features=features).save_to_disk(
        tmp_path / "images"
    )
    yield tmp_path
    datasets.enable_progress_bars()


def task_of(folder, *overrides):
    base = [f'data.cache_dir="{folder}/tokens"', "data.seq_len=16", *SMALL]
    return make_task(load_config(None, [*base, *overrides]).config)


def losses_of(task, steps=12, batch=24):
    """Mean losses of plain training steps; the first must be that of guessing."""
    torch.manual_seed(0)
    model = materialise(task).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        ids = [(step * batch + i) % len(task.train_data) for i in range(batch)]
        total, count = task.loss(model, default_collate([task.train_data[i] for i in ids]))
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / int(count))
    return losses


def test_texts_are_classified(hub):
    bert = ['model.source="hf:bert"', 'model.task="sequence_classification"', "model.num_labels=3"]
    task = task_of(hub, *bert, f'data.train="hf:{hub}/texts"', "model.vocab_size=256")
    sample = task.train_data[0]
    text = next(text for text in WORDS if bytes(sample["input_ids"][:4].tolist()).decode() in text)
    assert int(sample["labels"]) == WORDS.index(text)
    assert sample["attention_mask"].tolist() == (sample["input_ids"] != 0).long().tolist()
    assert len(task.train_data) + len(task.heldout_data) == 90
    losses = losses_of(task)
    assert losses[0] == pytest.approx(math.log(3), rel=0.1)
    assert losses[-1] < 0.7 * losses[0]
    with pytest.raises(
        ConfigError, match=r"E103 data 'hf:.*' has class 2, .* has 2 \(0\.\.1\)\. Set model.num_labels=3"
    ):
        task_of(hub, *bert[:2], f'data.train="hf:{hub}/texts"', "model.vocab_size=256")
    with pytest.raises(
        ConfigError, match=r"E108 data 'hf:.*' has no column 'image' or 'img' or 'pixel_values'"
    ):
        task_of(hub, 'model.source="hf:vit"', "model.num_labels=3", f'data.train="hf:{hub}/texts"')
    with pytest.raises(
        ConfigError, match=r"E108 task sequence_classification cannot read data.train = 'stdlib'; use"
    ):
        task_of(hub, *bert, 'data.train="stdlib"')
    with pytest.raises(ConfigError, match="E120 hf:gpt2 has no pad_token_id"):
        task_of(
            hub, 'model.source="hf:gpt2"', *bert[1:], f'data.train="hf:{hub}/texts"', "model.max_seq_len=16"
        )


def test_images_are_classified(hub, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1})
    )
    vit = [f'model.source="hf:{tmp_path}"', "model.num_labels=3"]
    task = task_of(hub, *vit, f'data.train="hf:{hub}/images"')
    sample = task.train_data[1]
    assert sample["pixel_values"].shape == (1, 8, 8)
    assert torch.allclose(
        sample["pixel_values"], torch.full((1, 8, 8), 80 * int(sample["labels"]) / 127.5 - 1)
    )
    losses = losses_of(task, steps=20)
    assert losses[-1] < 0.6 * losses[0]
    digits = task_of(hub, vit[0], "model.num_labels=10", 'data.train="digits"')
    assert digits.train_data[0]["pixel_values"].shape == (1, 8, 8)
    losses = losses_of(digits, steps=40, batch=48)
    assert losses[0] == pytest.approx(math.log(10), rel=0.1)
    assert losses[-1] < 0.7 * losses[0]
    with pytest.raises(ConfigError, match=r"E103 data 'digits' has class 9, the model has 3"):
        task_of(hub, *vit, 'data.train="digits"')


def test_masked_models_read_text(tmp_path):
    (tmp_path / "a.txt").write_text("the quick brown fox. " * 60)
    bert = ['model.source="hf:bert"', f'data.train="text:{tmp_path}/a.txt"', "model.vocab_size=257"]
    task = task_of(tmp_path, *bert)
    assert type(task.model).__name__ == "BertForMaskedLM"
    sample = task.train_data[3]
    assert set(sample) == {"input_ids", "attention_mask", "labels"}
    losses = losses_of(task, steps=25)
    assert losses[0] == pytest.approx(math.log(257), rel=0.1)
    assert losses[-1] < 0.7 * losses[0]
    with pytest.raises(ConfigError, match=r"E103 the mask is id 256, the model's vocabulary is 256\. Set"):
        task_of(tmp_path, *bert, "model.vocab_size=256")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<eos>": 0, "the": 1, "?": 2}, unk_token="?")
    )
    tokenizer.save(f"{tmp_path}/tokenizer.json")
    with pytest.raises(ConfigError, match=r'E122 data.tokenizer = ".*" has no \[MASK\] or <mask>'):
        task_of(tmp_path, *bert, f'data.tokenizer="{tmp_path}/tokenizer.json"')


MODULE = """
class Rows:
    def __len__(self):
        return {length}
    def __getitem__(self, index):
        import torch
        tokens = torch.arange(index, index + 9) % 50
        return {{"tokens": tokens[:-1], "labels": tokens[1:]}}
def rows():
    return Rows()
def number():
    return 3
"""


def test_datasets_of_the_users(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "some_rows.py").write_text(MODULE.format(length=20))
    (tmp_path / "no_rows.py").write_text(MODULE.format(length=0))
    llama = ['model.source="hf:llama"', "model.vocab_size=50", "model.num_kv_heads=1"]
    task = task_of(tmp_path, *llama, 'data.train="py:some_rows:rows"')
    assert len(task.train_data) == 20
    assert task.heldout_data is None
    assert losses_of(task)[-1] < math.log(50)
    assert (
        task_of(tmp_path, 'data.train="py:some_rows:rows"', 'data.eval="py:some_rows:rows"').heldout_data
        is not None
    )
    for place, text in (
        ("some_rows:none", r"E111 data.train = 'py:some_rows:none': .*has no attribute 'none'"),
        (
            "some_rows:number",
            r"E111 py:some_rows:number must return a dataset; what it returned has no __len__",
        ),
        ("no_rows:rows", r"E105 py:no_rows:rows must return a dataset; what it returned is empty"),
    ):
        with pytest.raises(ConfigError, match=text):
            task_of(tmp_path, *llama, f'data.train="py:{place}"')
