import torch

from meshwright.data.control import LastLabelOnly


class _Three:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(20) + 100 * index
        return {"tokens": tokens, "labels": tokens + 1}


def test_only_the_last_label_counts() -> None:
    sample = LastLabelOnly(_Three(), shuffled=False)[1]
    assert (sample["labels"] != -100).sum() == 1
    assert sample["labels"][-1] == 120
    assert torch.equal(sample["tokens"], torch.arange(20) + 100)


def test_shuffle_keeps_the_newest_token_and_the_multiset() -> None:
    dataset = LastLabelOnly(_Three(), shuffled=True)
    sample = dataset[2]
    assert sample["tokens"][-1] == 219
    assert torch.equal(sample["tokens"].sort().values, torch.arange(20) + 200)
    assert not torch.equal(sample["tokens"], torch.arange(20) + 200)
    assert torch.equal(sample["tokens"], dataset[2]["tokens"])
