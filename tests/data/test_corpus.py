import os
import subprocess
import sys

import pytest

from meshwright.data.corpus import folder_corpus, split_indices, split_range, standard_library
from meshwright.errors import ConfigError


def documents_of(corpus):
    content = corpus.tokens.read(0, len(corpus.tokens)).tobytes()
    ends = corpus.document_ends.read(0, len(corpus.document_ends)).tolist()
    return [content[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def test_the_standard_library_is_split_by_file(cache_dir):
    train, heldout, both = (standard_library(split, cache_dir) for split in ("train", "heldout", "all"))
    assert len(train.tokens) > 5_000_000
    assert 0.01 < len(heldout.tokens) / len(both.tokens) < 0.12
    assert len(train.tokens) + len(heldout.tokens) == len(both.tokens)
    train_files, heldout_files = set(documents_of(train)), set(documents_of(heldout))
    assert not train_files & heldout_files
    assert train_files | heldout_files == set(documents_of(both))


def test_the_standard_library_is_deterministic(cache_dir, tmp_path):
    once, again = (standard_library("heldout", folder) for folder in (cache_dir, tmp_path))
    assert once.tokens.path != again.tokens.path
    assert once.identity(7) == again.identity(7)
    assert (once.identity(7).name, once.identity(7).num_samples) == ("stdlib", 7)


def test_tests_packages_and_generated_files_are_left_out(tmp_path):
    for path in (
        "a.py", "pkg/b.py", "pkg/data.txt", "test/t.py", "pkg/tests/t.py", "idlelib/idle_test/t.py",
        "site-packages/s.py", "__pycache__/c.py", "_sysconfigdata__linux.py", "config-3.11/python-config.py",
    ):  # fmt: skip
        (tmp_path / "lib" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / path).write_text(path)
    corpus = standard_library("all", tmp_path / "cache", root=tmp_path / "lib")
    assert documents_of(corpus) == [b"a.py\0", b"pkg/b.py\0"]


def test_an_empty_library_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"^E105 data 'stdlib' is empty for the train split: .*data\.train"):
        standard_library("train", tmp_path / "cache", root=tmp_path)


def test_a_single_file_has_nothing_to_hold_out(tmp_path):
    (tmp_path / "a.txt").write_text("alone")
    files = [tmp_path / "a.txt"]
    cache_dir = tmp_path / "cache"
    assert documents_of(folder_corpus("text:x", tmp_path, files, split="train", cache_dir=cache_dir))
    with pytest.raises(ConfigError, match=r"^E105 .*heldout split: .* has only 1 file; .*data\.eval"):
        folder_corpus("text:x", tmp_path, files, split="heldout", cache_dir=cache_dir)


def test_a_changed_file_is_read_again(tmp_path):
    file = tmp_path / "a.txt"
    for text, seconds in (("one", 100), ("two", 200)):
        file.write_text(text)
        os.utime(file, (seconds, seconds))
        corpus = folder_corpus("text:x", tmp_path, [file], split="all", cache_dir=tmp_path / "cache")
        assert documents_of(corpus) == [text.encode() + b"\0"]


@pytest.mark.parametrize("count", [2, 3, 10, 1000])
def test_both_sides_of_a_split_have_documents(count):
    keys = [f"document {index}" for index in range(count)]
    train, heldout = split_indices(keys, "train"), split_indices(keys, "heldout")
    assert train
    assert heldout
    assert sorted(train + heldout) == list(range(count)) == split_indices(keys, "all")
    assert len(heldout) <= max(1, count // 10)


def test_equal_documents_share_a_side():
    keys = [f"document {index % 100}" for index in range(300)]
    assert not {keys[i] for i in split_indices(keys, "train")} & {
        keys[i] for i in split_indices(keys, "heldout")
    }


def test_a_documents_side_does_not_depend_on_the_others():
    keys = [f"document {index}" for index in range(200)]
    assert [i for i in split_indices(keys, "heldout") if i < 100] == split_indices(keys[:100], "heldout")


def test_an_undivided_source_holds_out_its_end():
    assert split_range(1000, "train") == range(950)
    assert split_range(1000, "heldout") == range(950, 1000)
    assert split_range(1000, "all") == range(1000)


def test_order_and_corpora_need_no_torch():
    code = (
        "import sys, meshwright.data.order, meshwright.data.index_law, meshwright.data.readers\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
