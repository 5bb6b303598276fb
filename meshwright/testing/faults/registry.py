"""All silent faults by name, and how one is handed to `meshwright.verify`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshwright.errors import ConfigError
from meshwright.testing.faults import (
    accumulation,
    forwards,
    norms,
    reductions,
    samples,
    sequences,
    servers,
    stages,
    tensor,
    tokens,
    updates,
    vocabulary,
)
from meshwright.testing.faults.silent import SilentFault, Site, draw_site
from meshwright.verification.rank import CandidateRank

_ALL = (
    *reductions.FAULTS,
    *accumulation.FAULTS,
    *norms.FAULTS,
    *updates.FAULTS,
    *forwards.FAULTS,
    *samples.FAULTS,
    *servers.FAULTS,
    *tensor.FAULTS,
    *vocabulary.FAULTS,
    *tokens.FAULTS,
    *sequences.FAULTS,
    *stages.FAULTS,
)
SILENT: Mapping[str, SilentFault] = MappingProxyType({fault.name: fault for fault in _ALL})


@dataclass(frozen=True)
class Injection:
    """What `meshwright.verify` takes as `inject`: commits a fault of the registry at a random site.

    Attributes:
        name: a name in `SILENT`.
        seed: of the site.
        steps: steps that are compared; `verify` compares 3 where it is not told.
        inert: parameters that no gradient reaches, at which a fault changes nothing.
    """

    name: str
    seed: int = 0
    steps: int = 3
    inert: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.name not in SILENT:
            near = difflib.get_close_matches(self.name, SILENT, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                "E803", f"there is no silent fault {self.name!r}.{hint} Known: {', '.join(SILENT)}"
            )

    def site(self, candidate: CandidateRank) -> Site:
        """Where the fault is committed: the same on every rank.

        Raises:
            ConfigError: E803 where plan or model do not meet the fault's needs.
        """
        return draw_site(SILENT[self.name], candidate, seed=self.seed, steps=self.steps, inert=self.inert)

    def __call__(self, candidate: CandidateRank) -> None:
        """Commit it on this rank; raises as `site`."""
        SILENT[self.name].inject(candidate, self.site(candidate))
