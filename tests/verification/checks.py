"""What every parity test asks of a result of `verify`."""

from meshwright.verification.result import VerifyResult

EVERY_CHECK = (
    "data",
    "loss",
    "activations",
    "gradients",
    "grad_norm",
    "parameters",
    "optimizer",
    "replicas",
    "counts",
)


def assert_one_device(result: VerifyResult, *, limit: float = 1e-12) -> None:
    """Every check has compared something, found it equal, and nothing differs by more than `limit`, relative."""
    assert result.ok, result.table()
    assert all(result.check(name).compared > 0 for name in EVERY_CHECK)
    assert max(found.worst_relative for found in result.checks) < limit
