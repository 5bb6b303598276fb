"""The stateless order of samples: sample id = f(seed, position), whatever the number of ranks.

Owns the endless stream of sample ids: epoch after epoch, each a pseudo-random permutation of the dataset.
Must not know ranks, steps or what a sample is. Nothing is stored, so a run resumes anywhere on any mesh.

Simplification: the permutations come from a small Feistel network (Luby and Rackoff 1988) walked back into
range (Black and Rogaway 2002, cycle walking). They are bijections that look random; they are not
cryptographic, and for a handful of samples not every permutation occurs.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_NUM_ROUNDS = 6
# Work is cut into blocks whose temporaries stay in the second-level cache.
_BLOCK_NUMEL = 1 << 15


def sample_ids(
    position: int, count: int, *, num_samples: int, seed: int, shuffle: bool = True
) -> npt.NDArray[np.int64]:
    """Ids of the samples at `position` .. `position + count - 1` of the endless stream.

    Epoch e covers the positions [e * num_samples, (e + 1) * num_samples) and visits every id of
    0 .. num_samples - 1 exactly once, in an order keyed by (seed, e). Memory is O(count).

    Args:
        position: first global stream position, 0 at the start of training.
        count: number of ids.
        num_samples: size of the dataset.
        seed: any integer; another seed is another order.
        shuffle: False keeps the order of the dataset in every epoch.

    Returns:
        int64 array of shape (count,).
    """
    assert position >= 0, f"position {position} is negative"
    assert count >= 0, f"count {count} is negative"
    assert num_samples >= 1, f"num_samples {num_samples}: an empty dataset has no order"
    if not shuffle:
        return np.arange(position, position + count, dtype=np.int64) % num_samples
    ids = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        epoch, offset = divmod(position + done, num_samples)
        epoch_count = min(num_samples - offset, count - done)
        keys = _round_keys(seed, epoch)
        for start in range(0, epoch_count, _BLOCK_NUMEL):
            stop = min(start + _BLOCK_NUMEL, epoch_count)
            indices = np.arange(offset + start, offset + stop, dtype=np.uint64)
            ids[done + start : done + stop] = _permute(indices, num_samples, keys)
        done += epoch_count
    return ids


def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _NUM_ROUNDS, person=b"sample order")
    return np.frombuffer(digest.digest(), dtype="<u8").astype(np.uint64)


def _permute(
    indices: npt.NDArray[np.uint64], num_samples: int, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Map each index of 0 .. num_samples - 1 by one bijection of that range."""
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    values = _feistel(indices, half_bits, keys)
    # The network permutes 0 .. 4**half_bits - 1. A value outside is sent on along its cycle, which started
    # inside and so comes back inside; fewer than four passes are expected.
    outside = np.flatnonzero(values >= num_samples)
    while outside.size:
        walked = _feistel(values[outside], half_bits, keys)
        values[outside] = walked
        outside = outside[walked >= num_samples]
    return values


def _feistel(
    values: npt.NDArray[np.uint64], half_bits: int, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        mixed = _mix(right + key)
        mixed &= mask
        left, right = right, left ^ mixed
    return (left << shift) | right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit words in place: the finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
