import json

import numpy as np
import pytest

from meshwright.data.readers import jsonl_corpus, nanogpt_corpus, text_corpus
from meshwright.errors import ConfigError


def content(corpus):
    return corpus.tokens.read(0, len(corpus.tokens)).tobytes()


def write_lines(path, texts, key="text"):
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def test_a_text_file_is_cut_at_its_end(tmp_path):
    (tmp_path / "a.txt").write_text("ä" * 50)
    parts = {split: text_corpus(tmp_path / "a.txt", split=split, cache_dir=tmp_path) for split in SPLITS}
    assert content(parts["train"]) + content(parts["heldout"]) == content(parts["all"]) == ("ä" * 50).encode()
    assert len(parts["heldout"].tokens) == 5
    assert parts["train"].document_ends is None


SPLITS = ("train", "heldout", "all")


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    for path in ("b.txt", "a/z.md", ".hidden", ".git/config"):
        (tmp_path / "notes" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "notes" / path).write_text(path)
    corpus = text_corpus(tmp_path / "notes", split="all", cache_dir=tmp_path / "cache")
    assert content(corpus) == b"a/z.md\0b.txt\0"


def test_binary_files_are_named(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.png").write_bytes(b"ab\0c")
    for path in (tmp_path / "notes", tmp_path / "notes" / "a.png"):
        with pytest.raises(
            ConfigError, match=r"^E108 .*a\.png is not text: it has a zero byte at offset 2; move"
        ):
            text_corpus(path, split="all", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_missing_and_empty_sources_are_named(tmp_path, split):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    cache_dir = tmp_path / "cache"
    with pytest.raises(
        ConfigError, match=rf"^E105 data 'text:.*empty for the {split} split: .*holds 0 tokens;"
    ):
        text_corpus(tmp_path / "empty.txt", split=split, cache_dir=cache_dir)
    with pytest.raises(ConfigError, match=r"^E105 .*no text file in .*folder;"):
        text_corpus(tmp_path / "folder", split=split, cache_dir=cache_dir)
    with pytest.raises(ConfigError, match=r"^E105 data 'jsonl:.*has no document for it;"):
        jsonl_corpus(tmp_path / "empty.txt", split=split, cache_dir=cache_dir)
    for read in (
        lambda path: text_corpus(path, split=split, cache_dir=cache_dir),
        lambda path: jsonl_corpus(path, split=split, cache_dir=cache_dir),
        lambda path: nanogpt_corpus(path, split=split),
    ):
        with pytest.raises(ConfigError, match=r"^E105 data '.*nowhere.* does not exist; give"):
            read(tmp_path / "nowhere")


def test_json_documents_are_split_by_their_text(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [f"document {index % 50} é" for index in range(100)])
    documents = {
        split: content(jsonl_corpus(path, split=split, cache_dir=tmp_path)).decode().split("\0")[:-1]
        for split in SPLITS
    }
    assert documents["all"] == [f"document {index % 50} é" for index in range(100)]
    assert len(documents["train"]) + len(documents["heldout"]) == 100
    assert documents["heldout"]
    assert not set(documents["train"]) & set(documents["heldout"])


def test_json_documents_under_another_key(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", ["a", "b"], key="body")
    assert content(jsonl_corpus(path, key="body", split="all", cache_dir=tmp_path)) == b"a\0b\0"
    with pytest.raises(
        ConfigError, match=r"^E108 .*d\.jsonl:1  key 'text' holds no text; text is under 'body'"
    ):
        jsonl_corpus(path, split="all", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("line", "text"),
    [("{", "not a JSON line"), ("[1]", "a JSON list"), ('{"text": 3}', "no key holds text")],
)
def test_unusable_json_lines_are_named_with_their_number(tmp_path, line, text):
    (tmp_path / "d.jsonl").write_text(f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=rf"^E108 .*d\.jsonl:3  .*{text}"):
        jsonl_corpus(tmp_path / "d.jsonl", split="train", cache_dir=tmp_path / "cache")


def test_nanogpt_files_are_mapped_without_a_copy(tmp_path):
    np.arange(1000, dtype="<u2").tofile(tmp_path / "ids.bin")
    train, heldout = (nanogpt_corpus(tmp_path / "ids.bin", split=split) for split in ("train", "heldout"))
    assert train.tokens.read(948, 950).tolist() == [948, 949]
    assert heldout.tokens.read(0, 2).tolist() == [950, 951]
    assert train.tokens.path == tmp_path / "ids.bin"
    assert isinstance(train.tokens.read(0, 2).base, np.memmap)
