"""Which attempt of a restarted job this is: a word that all its ranks agree on, and that no earlier attempt had.

torchrun's store outlives attempts, so each must keep its keys apart from those of the dead one. The count of restarts
does not do that: every host has its own, and where a worker dies only its host counts. Owns the agreement; must not
know processes. Simplification: earlier attempts are over on all hosts, as torchrun sees to before it starts the next.
"""

from __future__ import annotations

import secrets
import time

import torch.distributed as dist

_POLL_SECONDS = 0.02


def agree_on_attempt(store: dist.Store, *, rank: int, size: int, timeout_seconds: float) -> str:
    """A word that is the same on all ranks and new.

    Rank 0 draws it. Any other rank says hello by a number of its own and takes only an answer to that number: rank 0
    may first see the hello of a dead rank, and answers anew until each living one has said that it knows.

    Args:
        store: shared by the ranks; may hold keys of earlier attempts.
        rank: this rank.
        size: number of ranks; every one must call.
        timeout_seconds: how long rank 0 waits; the others wait as long as the store's own limit.

    Raises:
        TimeoutError: a rank did not come.
    """
    if rank == 0:
        return _answer_all(store, size, timeout_seconds)
    number = secrets.token_hex(8)
    store.set(f"hello/{rank}", number)
    attempt = bytes(store.get(f"answer/{number}")).decode()
    store.set(f"known/{attempt}/{rank}", "")
    return attempt


def _answer_all(store: dist.Store, size: int, timeout_seconds: float) -> str:
    attempt = secrets.token_hex(8)
    missing, answered = set(range(1, size)), set()
    end = time.monotonic() + timeout_seconds
    while missing:
        missing -= {rank for rank in missing if store.check([f"known/{attempt}/{rank}"])}
        for rank in (rank for rank in missing if store.check([f"hello/{rank}"])):
            number = bytes(store.get(f"hello/{rank}")).decode()
            if number not in answered:
                store.set(f"answer/{number}", attempt)
                answered.add(number)
        if missing and time.monotonic() > end:
            raise TimeoutError(f"ranks {sorted(missing)} did not come within {timeout_seconds:g} s")
        time.sleep(_POLL_SECONDS if missing else 0.0)
    return attempt
