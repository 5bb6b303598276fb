import json

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from meshwright.data.dataset import IGNORED_LABEL, DocumentDataset, SequenceRule, TokenDataset, open_data
from meshwright.data.digits import DigitsDataset
from meshwright.errors import ConfigError


def nanogpt(tmp_path, ids):
    np.asarray(ids, dtype="<u2").tofile(tmp_path / "ids.bin")
    return f"nanogpt:{tmp_path / 'ids.bin'}"


def jsonl(tmp_path, texts, key="text"):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return f"jsonl:{tmp_path / 'd.jsonl'}"


def open_all(spec, tmp_path, **rule):
    return open_data(spec, split="all", sequences=SequenceRule(**rule), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(("num_ids", "num_samples"), [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_packing_cuts_every_seq_len_tokens(tmp_path, num_ids, num_samples):
    dataset = open_all(nanogpt(tmp_path, range(num_ids)), tmp_path, seq_len=4)
    assert isinstance(dataset, TokenDataset)
    assert len(dataset) == num_samples
    for index in range(num_samples):
        item = dataset[index]
        assert item["tokens"].tolist() == list(range(4 * index, 4 * index + 4))
        assert item["labels"].tolist() == list(range(4 * index + 1, 4 * index + 5))
        assert item["tokens"].dtype == item["labels"].dtype == torch.int64
    with pytest.raises(IndexError):
        dataset[num_samples]


def test_packing_runs_across_documents(tmp_path):
    dataset = open_all(jsonl(tmp_path, ["ab", "cdef"]), tmp_path, seq_len=3)
    batch = default_collate(list(dataset))
    assert bytes(batch["tokens"].flatten().tolist()) == b"ab\0cde"
    assert bytes(batch["labels"].flatten().tolist()) == b"b\0cdef"


def test_too_short_a_corpus_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^E105 .*: 4 tokens, one sample needs data\.seq_len \+ 1 = 5; give"
    ):
        open_all(nanogpt(tmp_path, range(4)), tmp_path, seq_len=4)


def test_documents_are_padded_with_ignored_labels(tmp_path):
    dataset = open_all(jsonl(tmp_path, ["ab", "", "cdefgh", "i"]), tmp_path, seq_len=4, packing=False)
    assert isinstance(dataset, DocumentDataset)
    batch = default_collate(list(dataset))
    pad = IGNORED_LABEL
    assert batch["tokens"].tolist() == [[97, 98, 0, 0], [99, 100, 101, 102], [105, 0, 0, 0]]
    assert batch["labels"].tolist() == [[98, 0, pad, pad], [100, 101, 102, 103], [0, pad, pad, pad]]
    with pytest.raises(IndexError):
        dataset[3]


def test_overlong_documents_are_refused_on_request(tmp_path):
    spec = jsonl(tmp_path, ["ab", "cdefgh", "i"])
    text = r"^E107 document 1 of .* has 6 tokens, more than data\.seq_len = 4; .*truncate.*data\.seq_len = 6$"
    with pytest.raises(ConfigError, match=text):
        open_all(spec, tmp_path, seq_len=4, packing=False, overlong="error")
    fitting = open_all(spec, tmp_path, seq_len=6, packing=False, overlong="error")
    assert fitting[1]["labels"].tolist() == [100, 101, 102, 103, 104, 0]


def test_padding_needs_documents(tmp_path):
    with pytest.raises(ConfigError, match=r"^E108 .*where its documents end.*data\.packing = true"):
        open_all(nanogpt(tmp_path, range(9)), tmp_path, seq_len=4, packing=False)


def test_an_id_outside_the_vocabulary_is_named(tmp_path):
    spec = nanogpt(tmp_path, [1, 2, 3, 4, 5, 300, 7, 8, 9, 400])
    text = (
        r"^E103 .* has id 300 in sample 1, the model's vocabulary is 256 \(ids 0\.\.255\)\. "
        r"Set model\.vocab_size=401, or give tokens of another tokenizer\.$"
    )
    with pytest.raises(ConfigError, match=text):
        open_all(spec, tmp_path, seq_len=4, vocab_size=256)
    assert len(open_all(spec, tmp_path, seq_len=4, vocab_size=401)) == 2


def test_an_id_past_the_scan_at_start_is_named_when_read(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.data.dataset._START_CHECK_NUMEL", 4)
    dataset = open_all(nanogpt(tmp_path, [1, 2, 3, 4, 5, 300, 7, 8, 9]), tmp_path, seq_len=4, vocab_size=256)
    assert dataset[0]["tokens"].tolist() == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match=r"^E103 .*id 300 in sample 1.*vocab_size=301"):
        dataset[1]


def test_a_byte_outside_the_vocabulary_is_named_by_document(tmp_path):
    spec = jsonl(tmp_path, ["ab", "az"])
    with pytest.raises(ConfigError, match=r"^E103 .*id 122 in sample 1.*vocab_size=123"):
        open_all(spec, tmp_path, seq_len=4, packing=False, vocab_size=110)


def test_every_kind_opens(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    assert open_all(f"text:{tmp_path / 'a.txt'}", tmp_path, seq_len=4)[0]["tokens"].tolist() == [*b"some"]
    assert open_all(jsonl(tmp_path, ["abc"], key="k") + "#k", tmp_path, seq_len=2)[0]["labels"].tolist() == [
        98,
        99,
    ]
    assert isinstance(open_all("digits", tmp_path, seq_len=4), DigitsDataset)
    stdlib = open_all("stdlib", tmp_path, seq_len=128, vocab_size=256)
    assert len(stdlib) > 40_000
    identity = stdlib.identity()
    assert (identity.name, identity.split, identity.num_samples) == ("stdlib", "all", len(stdlib))


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("jsnol:x", r"Did you mean 'jsonl:PATH'\?"),
        ("stdlb", r"Did you mean 'stdlib'\?"),
        ("text:", r"Write text:PATH\."),
        ("stdlib:x", r"Write stdlib\."),
        ("some/where.jsonl", r"Did you mean 'jsonl:some/where\.jsonl'\?"),
        ("some/where.bin", r"Did you mean 'nanogpt:some/where\.bin'\?"),
        ("xyzzy", "no known source"),
    ],
)
def test_unknown_kinds_get_a_suggestion(tmp_path, spec, hint):
    with pytest.raises(
        ConfigError, match=rf"^E108 data '{spec}' .*{hint}.*Legal: stdlib, digits, text:PATH, jsonl"
    ):
        open_all(spec, tmp_path, seq_len=4)
