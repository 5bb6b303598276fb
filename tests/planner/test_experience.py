import pytest

from meshwright.errors import ConfigError
from meshwright.planner.experience import experience_file, keep_experience, read_experience, updated
from meshwright.presets.host import Learned

PARTS = {
    "compute": 0.8,
    "bubble": 0.0,
    "tensor": 0.1,
    "context": 0.0,
    "pipeline": 0.0,
    "weights": 0.0,
    "gradients": 0.05,
    "optimizer": 0.05,
}


def test_parts_take_the_blame_by_their_share():
    once = updated(Learned(), PARTS, 1.2, memory=(100.0, 110.0))
    assert once.compute == pytest.approx(1 + 0.5 * 0.2 * 0.8)
    assert once.exchange == pytest.approx(1 + 0.5 * 0.2 * 0.15)
    assert once.waiting == 1.0
    assert once.memory == pytest.approx(1.05)
    assert once.runs == 1
    assert updated(Learned(), PARTS, 1.2, memory=(100.0, 110.0)) == once


def test_runs_of_different_plans_tell_parts_apart():
    truth = {"compute": 1.1, "exchange": 0.7}
    learned = Learned()
    for turn in range(400):
        exchange = (0.05, 0.6)[turn % 2]
        raw = {**dict.fromkeys(PARTS, 0.0), "compute": 1.0, "tensor": exchange}
        parts = {**raw, "compute": learned.compute, "tensor": exchange * learned.exchange}
        measured = truth["compute"] + exchange * truth["exchange"]
        learned = updated(learned, parts, measured, memory=(1.0, 1.0))
    assert learned.compute == pytest.approx(1.1, rel=0.01)
    assert learned.exchange == pytest.approx(0.7, rel=0.05)


def test_one_odd_run_moves_little_and_many_not_without_end():
    learned = Learned()
    for _ in range(50):
        learned = updated(learned, PARTS, 100.0, memory=(1.0, 100.0))
    assert learned.compute == 2.0
    assert learned.memory == 2.0


def test_the_file(tmp_path):
    path = experience_file(tmp_path / "host-a.json")
    assert path.name == "host-a-learned.json"
    assert read_experience(path) == Learned()
    learned = Learned(compute=1.1, runs=2)
    keep_experience(path, learned)
    assert read_experience(path) == learned
    for text in ("", "[]", '{"format": 0}', '{"format": 1, "odd": 1}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"E299 .*Remove it"):
            read_experience(path)
