"""What n-gram tables reach on the default corpus: the bar for `make train`.

Interpolated Witten-Bell tables over bytes (Witten & Bell 1991): p_n = (c(h,w) + t(h) p_{n-1}) / (c(h) + t(h)) with c
counts and t(h) the number of different bytes seen after the context h. Trained on the training part of the standard
library's source, evaluated on its held-out part, the same split as `meshwright train`.

    python benchmarks/ngram.py --order 6
"""

from __future__ import annotations

import argparse

import numpy as np

from meshwright.data.corpus import standard_library
from meshwright.training.config import default_cache_dir


def keys_of(data: np.ndarray, order: int) -> np.ndarray:
    """The `order` bytes before each position from `order` on, packed into one integer each."""
    keys = np.zeros(len(data) - order, dtype=np.uint64)
    for offset in range(order):
        keys = (keys << np.uint64(8)) | data[offset : offset + len(keys)].astype(np.uint64)
    return keys


def lookup(table: np.ndarray, counts: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Counts of `keys` in a sorted table, 0 where absent."""
    where = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return np.where(table[where] == keys, counts[where], 0).astype(np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--order", type=int, default=6, help="longest context in bytes, at most 7")
    limit = parser.parse_args().order
    assert limit <= 7, "a context and the next byte must fit in 64 bits"
    parts = [standard_library(split, default_cache_dir()).tokens for split in ("train", "heldout")]
    train, heldout = (np.asarray(part.read(0, len(part))) for part in parts)
    probability = np.full(len(heldout), 1 / 256)
    for order in range(limit + 1):
        context, following = keys_of(train, order), train[order:].astype(np.uint64)
        pairs, pair_counts = np.unique((context << np.uint64(8)) | following, return_counts=True)
        contexts, kinds = np.unique(pairs >> np.uint64(8), return_counts=True)
        totals = np.add.reduceat(pair_counts, np.searchsorted(pairs >> np.uint64(8), contexts))
        held_context = keys_of(heldout, order)
        held_pairs = (held_context << np.uint64(8)) | heldout[order:].astype(np.uint64)
        c_pair = lookup(pairs, pair_counts, held_pairs)
        c, t = lookup(contexts, totals, held_context), lookup(contexts, kinds, held_context)
        lower = probability[order:]
        probability[order:] = np.where(c > 0, (c_pair + t * lower) / np.maximum(c + t, 1), lower)
        print(
            f"context {order} bytes: {-np.log(probability[limit:]).mean():.4f} nats a byte, {len(pairs):,} entries"
        )


if __name__ == "__main__":
    main()
