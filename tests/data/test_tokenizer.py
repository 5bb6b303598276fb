"""Text by a tokenizer.json: ids, separators, caches of their own, and files that cannot be used."""

import json

import numpy as np
import pytest

from meshwright.data.dataset import SequenceRule, open_data
from meshwright.data.tokenizer import BYTES, open_tokenizer
from meshwright.errors import ConfigError

tokenizers = pytest.importorskip("tokenizers")

TEXT = "the quick brown fox jumps over the lazy dog\nand the quick dog sleeps\n" * 40


def train(path, special=("<|endoftext|>",), vocab_size=300):
    """A byte-level BPE, as GPT-2's."""
    kinds = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        kinds(add_prefix_space=False),
        tokenizers.decoders.ByteLevel(),
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=kinds.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def test_documents_are_encoded_and_separated(tmp_path):
    tokenizer = train(tmp_path / "tokenizer.json")
    encoder = open_tokenizer(f"{tmp_path}/tokenizer.json")
    assert (encoder.separator, encoder.vocab_size, encoder.dtype) == (0, tokenizer.get_vocab_size(), "<u2")
    texts = ["the quick fox", "dog é", "x" * 50]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    rule = SequenceRule(6, vocab_size=encoder.vocab_size, packing=False, encoder=encoder)
    dataset = open_data(f"jsonl:{tmp_path}/d.jsonl", split="all", sequences=rule, cache_dir=tmp_path / "c")
    expected = [[*tokenizer.encode(text).ids, 0] for text in texts]
    assert dataset.corpus.tokens.read(0, len(dataset.corpus.tokens)).tolist() == [
        token for ids in expected for token in ids
    ]
    assert (
        dataset.corpus.document_ends.read(0, 3).tolist() == np.cumsum([len(ids) for ids in expected]).tolist()
    )
    assert dataset[1]["labels"].tolist() == (expected[1][1:] + [-100] * 6)[:6]
    # Bytes of the same file lie beside it, and another tokenizer gets an entry of its own.
    count = len(list((tmp_path / "c").iterdir()))
    open_data(f"jsonl:{tmp_path}/d.jsonl", split="all", sequences=SequenceRule(6), cache_dir=tmp_path / "c")
    train(tmp_path / "other" / "tokenizer.json", vocab_size=280)
    rule = SequenceRule(6, encoder=open_tokenizer(f"{tmp_path}/other"))
    open_data(f"jsonl:{tmp_path}/d.jsonl", split="all", sequences=rule, cache_dir=tmp_path / "c")
    assert len(list((tmp_path / "c").iterdir())) == 3 * count


def test_one_file_is_encoded_in_blocks_of_lines(tmp_path, monkeypatch):
    tokenizer = train(tmp_path / "tokenizer.json")
    monkeypatch.setattr("meshwright.data.readers._BLOCK_BYTES", 100)
    (tmp_path / "a.txt").write_text(TEXT)
    rule = SequenceRule(8, encoder=open_tokenizer(f"{tmp_path}/tokenizer.json"))
    parts = [
        open_data(
            f"text:{tmp_path}/a.txt", split=split, sequences=rule, cache_dir=tmp_path / "c"
        ).corpus.tokens
        for split in ("train", "heldout")
    ]
    ids = [token for part in parts for token in part.read(0, len(part)).tolist()]
    assert tokenizer.decode(ids) == TEXT
    assert 0 not in ids
    assert len(parts[1]) == len(ids) // 20


def test_folders_and_the_standard_library_take_a_tokenizer(tmp_path):
    train(tmp_path / "tokenizer.json")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("the dog")
    (tmp_path / "notes" / "b.txt").write_bytes(b"quick \xff")
    rule = SequenceRule(2, encoder=open_tokenizer(f"{tmp_path}"))
    dataset = open_data(f"text:{tmp_path}/notes", split="all", sequences=rule, cache_dir=tmp_path / "c")
    ids = dataset.corpus.tokens.read(0, len(dataset.corpus.tokens)).tolist()
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the dog<|endoftext|>quick \ufffd<|endoftext|>"


def test_the_end_of_a_document(tmp_path):
    path = tmp_path / "tokenizer.json"
    train(path, special=("[PAD]", "[SEP]", "[MASK]", "<end>"))
    encoder = open_tokenizer(str(path))
    assert (encoder.separator, encoder.mask) == (1, 2)
    for named in ("<end>", {"content": "<end>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        assert open_tokenizer(str(path)).separator == 3
    train(tmp_path / "bare" / "tokenizer.json", special=())
    with pytest.raises(
        ConfigError, match=r"^E122 .*tokenizer\.json has none of the tokens that end a document \("
    ):
        open_tokenizer(f"{tmp_path}/bare")


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    words = {"<eos>": 0, "far": 69_999, "?": 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.save(f"{tmp_path}/tokenizer.json")
    encoder = open_tokenizer(f"{tmp_path}/tokenizer.json")
    assert (encoder.vocab_size, encoder.dtype) == (70_000, "<u4")
    assert [ids.tolist() for ids in encoder.encode([b"far"])] == [[69_999]]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            "nowhere.json",
            r'E122 data\.tokenizer = "nowhere\.json": /.*nowhere\.json has no tokenizer\.json here',
        ),
        (
            "hf:org/none",
            r'E122 data\.tokenizer = "hf:org/none": .*Fetch it: hf download org/none Write "byte"',
        ),
    ],
)
def test_tokenizers_that_are_not_here_are_named(spec, text):
    with pytest.raises(ConfigError, match=text):
        open_tokenizer(spec)


def test_unusable_tokenizers_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^E122 .*tokenizer\.json is no tokenizer\.json that can be read"):
        open_tokenizer(f"{tmp_path}/tokenizer.json")
    train(tmp_path / "tokenizer.json")
    encoder = open_tokenizer(f"{tmp_path}/tokenizer.json")
    (tmp_path / "a.txt").write_text(TEXT)
    size = encoder.vocab_size
    rule = SequenceRule(8, vocab_size=256, encoder=encoder)
    text = rf"^E103 .*tokenizer\.json has {size} ids, .* is 256\. Set model\.vocab_size={size}, or data"
    with pytest.raises(ConfigError, match=text):
        open_data(f"text:{tmp_path}/a.txt", split="all", sequences=rule, cache_dir=tmp_path / "c")


def test_bytes_are_the_default():
    assert open_tokenizer("byte") is BYTES
    assert BYTES.encode_whole("aé", 2) == [97, 195]
