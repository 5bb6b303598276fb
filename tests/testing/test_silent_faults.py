"""The registry of silent faults, and what it refuses."""

import pytest

import meshwright
from meshwright.errors import ConfigError
from meshwright.testing.faults.registry import SILENT, Injection
from meshwright.testing.faults.silent import NEEDS
from meshwright.verification.result import CHECK_NAMES
from tests.verification.models import Net, Rows, loss_of_labels


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """Tiny models wait for threads longer than they compute."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_the_registry_is_consistent():
    for name, fault in SILENT.items():
        assert fault.name == name
        assert set(fault.expected) <= set(CHECK_NAMES), name
        assert set(fault.needs) <= set(NEEDS), name
        assert fault.source, name


def test_no_gradient_reduction_lets_replicas_drift_from_step_1():
    injection = Injection("no_gradient_reduction")
    result = meshwright.verify(Net, loss_of_labels, Rows(), plan="zero=0", processes=2, inject=injection)
    first = result.first_wrong
    assert first is not None
    assert (first.check, first.step) == ("gradients", 1)
    assert "not reduced over dp" in first.cause
    assert result.check("replicas").first_wrong.step == 1


def test_an_unknown_fault():
    with pytest.raises(ConfigError, match=r"E803 .*'no_reduction'\. Did you mean 'no_gradient_reduction'\?"):
        Injection("no_reduction")


def test_a_fault_whose_needs_are_not_met():
    text = r"E803 fault 'no_gradient_reduction' cannot be committed in Net under zero1 .* needs policy ddp\."
    with pytest.raises(ConfigError, match=text):
        meshwright.verify(Net, loss_of_labels, Rows(), processes=2, inject=Injection("no_gradient_reduction"))
