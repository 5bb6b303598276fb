"""A rank's part of a micro-batch, as the stages of a pipeline get it: data, and what surrounds its passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any


def _accept(_count: float) -> None:
    """Any count is right where a rank has whole samples."""


@dataclass(frozen=True)
class Part:
    """A rank's part of a micro-batch.

    Attributes:
        batch: of the user's form.
        forward: entered around each forward of a stage.
        backward: the same of each backward, before which other micro-batches have had their forwards.
        check_count: raises where the loss counted something else than this part has.
    """

    batch: Any
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    backward: Callable[[], AbstractContextManager[Any]] = nullcontext
    check_count: Callable[[float], None] = _accept
