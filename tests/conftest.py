import gc
from collections.abc import Iterator

import pytest

from meshwright.testing.ranks import RankPool


def pytest_collection_finish() -> None:
    """What imports made stays: tests that collect garbage would walk all of it, for 0.15 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """One pool of warm ranks for the whole suite."""
    pool = RankPool()
    yield pool
    pool.close()
