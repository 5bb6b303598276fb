"""Hidden tokens: how many, what becomes of them, and that only (seed, index) decides."""

import torch

from meshwright.data.masked import MaskedDataset


class Sequences:
    def __len__(self):
        return 200

    def __getitem__(self, index):
        tokens = torch.randint(10, 90, (100,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[70 + index % 20 :] = -100
        return {"tokens": tokens, "labels": labels}


def test_hidden_tokens():
    masked = MaskedDataset(Sequences(), mask=99, vocab_size=100, seed=1)
    hidden = shown_mask = kept = valid = 0
    for index in range(len(masked)):
        sample, source = masked[index], Sequences()[index]
        counts = sample["labels"] != -100
        assert torch.equal(sample["attention_mask"].bool(), source["labels"] != -100)
        assert not bool((counts & (source["labels"] == -100)).any())
        assert torch.equal(sample["labels"][counts], source["tokens"][counts])
        assert torch.equal(sample["input_ids"][~counts], source["tokens"][~counts])
        hidden += int(counts.sum())
        valid += int((source["labels"] != -100).sum())
        shown_mask += int((sample["input_ids"][counts] == 99).sum())
        kept += int((sample["input_ids"][counts] == source["tokens"][counts]).sum())
    assert abs(hidden / valid - 0.15) < 0.01
    assert abs(shown_mask / hidden - 0.8) < 0.03
    assert abs(kept / hidden - 0.1) < 0.03


def test_only_seed_and_index_decide():
    first, again = (MaskedDataset(Sequences(), mask=99, vocab_size=100, seed=1) for _ in range(2))
    torch.manual_seed(5)
    before = first[7]
    torch.manual_seed(6)
    assert all(torch.equal(before[key], again[7][key]) for key in before)
    other = MaskedDataset(Sequences(), mask=99, vocab_size=100, seed=2)
    assert not torch.equal(before["input_ids"], other[7]["input_ids"])
    assert not torch.equal(before["labels"] == -100, first[8]["labels"] == -100)
