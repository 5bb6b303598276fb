"""Parquet files and Hugging Face data sets: columns of text and of ids as documents."""

import json

import pytest

from meshwright.data.dataset import SequenceRule, open_data
from meshwright.data.hub_datasets import hub_corpus, open_table
from meshwright.data.parquet import parquet_corpus
from meshwright.errors import ConfigError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"text {index % 40} é" for index in range(80)] + ["", None]


def documents_of(corpus, *, strip=1):
    ends = corpus.document_ends.read(0, len(corpus.document_ends)).tolist()
    ids = corpus.tokens.read(0, len(corpus.tokens))
    return [ids[start : end - strip].tolist() for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def texts_of(corpus):
    return [bytes(ids).decode() for ids in documents_of(corpus)]


def test_text_of_row_groups_and_files_in_order(tmp_path):
    for name, rows in (("b", TEXTS[50:]), ("a", TEXTS[:50])):
        parquet.write_table(
            pa.table({"id": range(len(rows)), "text": rows}), tmp_path / f"{name}.parquet", row_group_size=7
        )
    parts = {
        s: parquet_corpus(tmp_path, split=s, cache_dir=tmp_path / "c") for s in ("train", "heldout", "all")
    }
    assert texts_of(parts["all"]) == TEXTS[:80]
    train, heldout = texts_of(parts["train"]), texts_of(parts["heldout"])
    assert len(train) + len(heldout) == 80
    assert heldout
    assert not set(train) & set(heldout)
    # The cache is used again: no second entry is made.
    files = sorted(path.name for path in (tmp_path / "c").iterdir())
    parquet_corpus(tmp_path, split="train", cache_dir=tmp_path / "c")
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == files


@pytest.mark.parametrize("kind", ["list", "large_list", "fixed"])
def test_ids_keep_what_ends_them(tmp_path, kind):
    rows = [[index, 70_000, 1] for index in range(30)]
    types = {
        "list": pa.list_(pa.int32()),
        "large_list": pa.large_list(pa.uint32()),
        "fixed": pa.list_(pa.int64(), 3),
    }
    table = pa.table({"toks": pa.array([*rows, None] if kind != "fixed" else rows, types[kind])})
    parquet.write_table(table, tmp_path / "d.parquet", row_group_size=4)
    rule = SequenceRule(4, packing=False)
    dataset = open_data(
        f"parquet:{tmp_path}/d.parquet#toks", split="all", sequences=rule, cache_dir=tmp_path / "c"
    )
    assert documents_of(dataset.corpus, strip=0) == rows
    assert dataset[7]["tokens"].tolist() == [7, 70_000, 0, 0]
    assert dataset[7]["labels"].tolist() == [70_000, 1, -100, -100]


@pytest.mark.parametrize(
    ("table", "column", "text"),
    [
        (
            {"body": ["a"], "n": [1]},
            None,
            r"E108 .*d\.parquet has not a column text, .* \(documents can be in body: name",
        ),
        (
            {"body": ["a"]},
            "nobody",
            r"E108 .* has not column 'nobody' with text or ids \(documents can be in body",
        ),
        ({"text": [1.5]}, None, r"E108 .*\(no column can be read\)"),
        ({"input_ids": [[1, -2]]}, None, r"E103 a document holds the id -2"),
        ({"text": [""]}, None, r"E105 data 'parquet:.*it has no document for it"),
    ],
)
def test_unusable_columns_are_named(tmp_path, table, column, text):
    parquet.write_table(pa.table(table), tmp_path / "d.parquet")
    with pytest.raises(ConfigError, match=text):
        parquet_corpus(tmp_path / "d.parquet", column=column, split="all", cache_dir=tmp_path / "c")


def test_unusable_parquet_files_are_named(tmp_path):
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match=r"E108 .*a\.parquet is no parquet file that can be read"):
        parquet_corpus(tmp_path, split="all", cache_dir=tmp_path / "c")
    (tmp_path / "folder").mkdir()
    for path in ("nowhere", "folder"):
        with pytest.raises(ConfigError, match=rf"E105 data 'parquet:.*{path}.* does not exist"):
            parquet_corpus(tmp_path / path, split="all", cache_dir=tmp_path / "c")
    parquet.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    parquet.write_table(pa.table({"other": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(
        ConfigError, match=r"E108 .*b\.parquet has no column 'text', which the first file has"
    ):
        parquet_corpus(tmp_path, split="all", cache_dir=tmp_path / "c")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The library with caches of its own."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache" / "datasets")
    datasets.disable_progress_bars()
    yield datasets
    datasets.enable_progress_bars()


def test_saved_data_sets_and_splits(hub, tmp_path):
    one = hub.Dataset.from_dict({"text": TEXTS[:80]})
    one.save_to_disk(tmp_path / "one")
    corpora = {
        s: hub_corpus(f"{tmp_path}/one", split=s, cache_dir=tmp_path / "c")
        for s in ("train", "heldout", "all")
    }
    assert texts_of(corpora["all"]) == TEXTS[:80]
    assert len(texts_of(corpora["train"])) + len(texts_of(corpora["heldout"])) == 80
    ids = hub.Dataset.from_dict({"input_ids": [[5, 6], [7]]})
    hub.DatasetDict({"train": one, "test": ids}).save_to_disk(tmp_path / "two")
    assert documents_of(
        hub_corpus(f"{tmp_path}/two@test", split="all", cache_dir=tmp_path / "c"), strip=0
    ) == [[5, 6], [7]]
    assert open_table(f"{tmp_path}/two#text")[0].num_rows == 80
    with pytest.raises(
        ConfigError, match=r"^E105 data 'hf:.*two@dev' has no split 'dev'; it has train, test"
    ):
        open_table(f"{tmp_path}/two@dev")


def test_folders_of_files_and_what_was_prepared_before(hub, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert texts_of(hub_corpus(f"{tmp_path}/files", split="all", cache_dir=tmp_path / "c")) == ["a", "b"]
    # As the library leaves a data set of the hub in its cache.
    table = hub.load_dataset("json", data_files=str(tmp_path / "files" / "train.jsonl"))["train"]
    made = next((tmp_path / "cache" / "datasets").glob("json/*/*/*/dataset_info.json")).parent
    kept = tmp_path / "cache" / "datasets" / "org___letters" / "default" / made.parts[-2] / made.parts[-1]
    kept.parent.mkdir(parents=True)
    made.rename(kept)
    info = json.loads((kept / "dataset_info.json").read_text())
    info |= {"dataset_name": "letters", "config_name": "default"}
    (kept / "dataset_info.json").write_text(json.dumps(info))
    (kept / "json-train.arrow").rename(kept / "letters-train.arrow")
    assert len(table) == 2
    found = hub_corpus("org/letters", split="all", cache_dir=tmp_path / "c")
    assert texts_of(found) == ["a", "b"]


def test_what_is_not_here_is_never_fetched(hub, tmp_path):
    with pytest.raises(
        ConfigError, match=r"^E105 data 'hf:org/none': .*: hf download --repo-type dataset org/none"
    ):
        open_table("org/none")
    with pytest.raises(ConfigError, match=r"^E105 data 'hf:\./none': "):
        open_table("./none")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "a.xyz").write_text("?")
    with pytest.raises(ConfigError, match=r"^E108 data 'hf:.*odd' cannot be read: "):
        open_table(f"{tmp_path}/odd")
    with pytest.raises(ConfigError, match=r"^E108 data 'hf:@x': write hf:PATH_OR_ID"):
        open_table("@x")
