from collections.abc import Iterator

import pytest

from meshwright.testing.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """One pool of warm ranks for the whole suite."""
    pool = RankPool()
    yield pool
    pool.close()
