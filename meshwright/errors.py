"""Every error a user can meet: its code, and texts that name the value, the rule and the fix.

Owns the exception types and the exit codes of the command line. Knows nothing of torch.
Users' mistakes raise one of these types; broken invariants of our own are `assert`s with a message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

EXIT_OK = 0
EXIT_CONFIG = 2
EXIT_DOES_NOT_FIT = 3
EXIT_VERIFY_FAILED = 4
EXIT_WORKER_FAILED = 5
EXIT_INTERRUPTED = 130


class MeshwrightError(Exception):
    """An error with a stable code, e.g. `E203`; `meshwright explain E203` says more.

    Attributes:
        code: stable identifier, one letter and three digits.
        message: what is wrong with which numbers, and what to change.
        where: file and line, or empty.
    """

    exit_code = EXIT_CONFIG

    def __init__(self, code: str, message: str, *, where: str = "") -> None:
        self.code = code
        self.message = message
        self.where = where
        super().__init__(str(self))

    def __str__(self) -> str:
        place = f"{self.where}  " if self.where else ""
        return f"{self.code} {place}{self.message}"

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel from workers to the launcher by pickle; keyword arguments need help there.
        return (_rebuild, (type(self), self.code, self.message, self.where))


def _rebuild(kind: type[MeshwrightError], code: str, message: str, where: str) -> MeshwrightError:
    return kind(code, message, where=where)


class ConfigError(MeshwrightError):
    """E1xx: a key, a value or a unit of the run file is wrong."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the writing of a file that the user named: E297 where that is not possible."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            "E297", f"cannot write {str(path)!r}: {reason}. Name a place that can be written, e.g. with --out"
        ) from error


class PlanError(MeshwrightError):
    """E2xx: a layout that cannot run on this mesh; legal values are in the message."""


class DoesNotFitError(MeshwrightError):
    """E3xx: the run needs more memory than there is; nothing was started."""

    exit_code = EXIT_DOES_NOT_FIT


class WorkerError(MeshwrightError):
    """E4xx: a worker died, hung or left the common order of collectives."""

    exit_code = EXIT_WORKER_FAILED


class CheckpointError(MeshwrightError):
    """E5xx: a checkpoint of another model, one that is damaged or missing, or state that it cannot hold."""


class SaveError(CheckpointError):
    """E504: a checkpoint could not be written, so the run stops while the ones before it are valid."""

    exit_code = EXIT_WORKER_FAILED


class NumericsError(MeshwrightError):
    """E6xx: a loss or gradient is not a finite number."""

    exit_code = EXIT_WORKER_FAILED


class LoopError(MeshwrightError):
    """E7xx: a call of a user's own loop at the wrong time, or on some ranks only."""

    exit_code = EXIT_WORKER_FAILED


class ConfigErrors(MeshwrightError):
    """All problems of one configuration in one list, so that nobody mends them one by one."""

    def __init__(self, errors: list[MeshwrightError]) -> None:
        assert errors, "ConfigErrors needs at least one error"
        self.errors = errors
        super().__init__(errors[0].code, "\n".join(str(error) for error in errors)[len(errors[0].code) + 1 :])

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)

    def __reduce__(self) -> tuple[object, ...]:
        return (ConfigErrors, (self.errors,))
