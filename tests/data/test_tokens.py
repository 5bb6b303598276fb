import hashlib
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from meshwright.data.tokens import TokenFile, cached_documents
from meshwright.errors import ConfigError


@pytest.fixture
def ids_path(tmp_path):
    path = tmp_path / "ids.bin"
    np.arange(1000, 1100, dtype="<u2").tofile(path)
    return path


def test_reads_are_read_only_views_of_the_file(ids_path):
    tokens = TokenFile(ids_path, "<u2")
    assert len(tokens) == 100
    assert tokens.read(3, 6).tolist() == [1003, 1004, 1005]
    assert not tokens.read(3, 6).flags.writeable
    assert tokens.read(100, 100).tolist() == []


def test_a_part_is_a_token_file_of_its_own(ids_path):
    part = TokenFile(ids_path, "<u2").part(90, 100).part(2, 8)
    assert len(part) == 6
    assert part.read(0, 6).tolist() == list(range(1092, 1098))
    assert part.sha256() == hashlib.sha256(np.arange(1092, 1098, dtype="<u2").tobytes()).hexdigest()
    with pytest.raises(AssertionError, match="outside the 6 ids"):
        part.read(0, 7)


def test_pickle_carries_the_path_and_not_the_content(ids_path):
    tokens = TokenFile(ids_path, "<u2", start=10, stop=20)
    tokens.read(0, 1)
    data = pickle.dumps(tokens)
    ids_path.write_bytes(np.arange(5000, 5100, dtype="<u2").tobytes())
    assert pickle.loads(data).read(0, 2).tolist() == [5010, 5011]


def test_missing_and_ragged_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"^E105 .*nothing\.bin: no such file; give"):
        TokenFile(tmp_path / "nothing.bin", np.uint8)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(
        ConfigError, match=r"^E108 .*odd\.bin has 3 bytes, no multiple of the 2 bytes .*text:PATH"
    ):
        TokenFile(tmp_path / "odd.bin", np.uint16)


def test_documents_are_flattened_with_separators_and_built_once(tmp_path):
    builds = []

    def documents():
        builds.append(1)
        return [b"ab", b"", b"c"]

    for _ in range(2):
        tokens, ends = cached_documents(tmp_path / "cache", "key", documents)
        assert tokens.read(0, len(tokens)).tobytes() == b"ab\0c\0"
        assert ends.read(0, len(ends)).tolist() == [3, 5]
    assert len(builds) == 1


def test_concurrent_builds_of_one_entry_agree(tmp_path):
    everyone_builds = Barrier(4, timeout=30)

    def documents():
        for index in range(50):
            if index == 25:
                everyone_builds.wait()
            yield bytes([65 + index]) * 1000

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: cached_documents(tmp_path, "key", documents), range(4)))
    assert {tokens.sha256() for tokens, _ in results} == {results[0][0].sha256()}
    assert all(len(ends) == 50 for _, ends in results)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key.ends", "key.tokens"]


def test_a_failed_build_leaves_nothing(tmp_path):
    def documents():
        yield b"abc"
        raise ValueError("broken source")

    with pytest.raises(ValueError, match="broken source"):
        cached_documents(tmp_path, "key", documents)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(
        ConfigError, match=r"^E115 the cache folder .*file/cache cannot be made .*data\.cache_dir"
    ):
        cached_documents(tmp_path / "file" / "cache", "key", lambda: [b"a"])
