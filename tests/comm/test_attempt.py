"""Ranks of an attempt agree on a word although the store remembers an attempt that has died."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from meshwright.comm.attempt import agree_on_attempt

SIZE = 3


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def attempt_of(server: dist.TCPStore, rank: int) -> str:
    """What a rank is told that has its own connection."""
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))
    return agree_on_attempt(store, rank=rank, size=SIZE, timeout_seconds=20)


def run(server: dist.TCPStore, order: tuple[int, ...]) -> set[str]:
    with ThreadPoolExecutor(SIZE) as pool:
        return set(pool.map(lambda rank: attempt_of(server, rank), order))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_each_attempt_has_one_word_of_its_own(server, order):
    words = [run(server, order) for _ in range(4)]
    assert [len(word) for word in words] == [1] * 4
    assert len(set.union(*words)) == 4


def test_a_rank_that_died_before_it_was_answered_misleads_nobody(server):
    for rank in (1, 2):
        server.set(f"hello/{rank}", f"of dead rank {rank}")
    assert len(run(server, (0, 1, 2))) == 1


def test_a_rank_that_does_not_come_is_named(server):
    server.set("hello/2", "of a dead rank")
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not come within 0.2 s"):
        agree_on_attempt(server, rank=0, size=SIZE, timeout_seconds=0.2)
