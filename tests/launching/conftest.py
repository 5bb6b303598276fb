import os
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_processes import processes_where, wait_until

from meshwright.comm.log import read_ring


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests here that are marked `parity` run only when the mark is asked for."""
    if "parity" in config.getoption("markexpr"):
        return
    here = Path(__file__).parent
    left_out = [
        item for item in items if item.path.is_relative_to(here) and item.get_closest_marker("parity")
    ]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture
def assert_none_left() -> Callable[[Path], None]:
    """No process has a file of the run folder open or mapped."""

    def check(run_dir: Path) -> None:
        def uses(folder: Path) -> bool:
            if str(run_dir) in (folder / "maps").read_text():
                return True
            return any(str(run_dir) in os.readlink(link) for link in (folder / "fd").iterdir())

        wait_until(lambda: not processes_where(uses), 3, f"left: {processes_where(uses)}")
        for ring in (run_dir / "events").glob("*.ring"):
            state = read_ring(ring)
            assert state is None or not Path(f"/proc/{state.pid}").exists()

    return check


@pytest.fixture
def assert_session_empty() -> Callable[[int], None]:
    """No process of the session is left, servers included."""

    def check(session: int) -> None:
        def belongs(folder: Path) -> bool:
            return int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session

        # The server of workers notices the launcher's end when it has imported torch.
        wait_until(lambda: not processes_where(belongs), 20, f"left: {processes_where(belongs)}")

    return check


@pytest.fixture
def own_script(request, tmp_path, monkeypatch) -> Path:
    """The `SCRIPT` of a test module as a file in a folder of its own, for ranks of one thread."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("own.py").write_text(request.module.SCRIPT)
    return Path("own.py")
