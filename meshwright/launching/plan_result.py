"""What `meshwright.plan` returns: plans as plain values, and questions about them.

Owns names that a script reads; all of it is asked of the planner, the simulator and the drawings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.planner.compare import Answer, answer_about
from meshwright.planner.cost import Cost, cost_of, parse_tokens
from meshwright.planner.lock import LOCK_NAME, lock_value, save_lock
from meshwright.planner.plans import Plan, Plans, describe
from meshwright.planner.request import Request
from meshwright.planner.runnable import plan_keys
from meshwright.planner.take import Offered, first_runnable
from meshwright.planner.text import Spending, table_lines, warnings_of
from meshwright.reporting.picture import Picture
from meshwright.reporting.plans import draw_front, draw_schedule, plans_table
from meshwright.simulation.job import Layout
from meshwright.training.units import toml_literal


@dataclass(frozen=True)
class PlanEntry:
    """One plan.

    Attributes:
        number: its place, from 1.
        found: as the planner has it.
        request: what was asked.
    """

    number: int
    found: Plan
    request: Request

    @property
    def layout(self) -> Layout:
        """Its degrees and choices."""
        return self.found.layout

    @property
    def keys(self) -> Mapping[str, object]:
        """The keys of a run's `[plan]` that say it."""
        return plan_keys(self.layout)

    @property
    def text(self) -> str:
        """The keys as `plan=` of `train` and `verify` takes them: "dp=2,zero=1"."""
        return ",".join(f"{key}={toml_literal(value)}" for key, value in self.keys.items())

    @property
    def step_seconds(self) -> float:
        """Of a step, predicted."""
        return self.found.predicted.step.total

    @property
    def step_parts(self) -> Mapping[str, float]:
        """Seconds of a step by part; `recompute` is in `compute`."""
        return asdict(self.found.predicted.step)

    @property
    def mfu(self) -> float | None:
        """FLOPs of the model over the devices' peak; None on hosts that were measured, whose peak is not known."""
        return self.found.predicted.mfu

    @property
    def tokens_per_second_per_device(self) -> float:
        """Of training."""
        return self.found.predicted.tokens_per_second_per_device

    @property
    def memory(self) -> Mapping[str, float]:
        """Bytes of the fullest rank by category, and their sum as `peak`."""
        own = self.found.predicted.memory
        return {**asdict(own), "peak": own.peak}

    @property
    def obstacle(self) -> str:
        """Why training does not run it today; empty where it does."""
        return self.found.obstacle

    def cost(self, tokens: str | float, *, usd_per_gpu_hour: float | None = None) -> Cost:
        """What training takes.

        Args:
            tokens: of the whole run: "100B tokens", or a number.
            usd_per_gpu_hour: dollars of a device and hour; None: no dollars are said.

        Raises:
            ConfigError: E102 for tokens without a legal unit.
        """
        number = parse_tokens(tokens, name="tokens") if isinstance(tokens, str) else float(tokens)
        return cost_of(self.found.predicted, self.request, number, usd_per_gpu_hour)

    def __repr__(self) -> str:
        return f"plan {self.number}: {describe(self.layout)}: {self.step_seconds:.3g} s a step"


@dataclass(frozen=True, repr=False)
class PlanResult:
    """All plans of a question, best first; a table where it is shown.

    Attributes:
        found: as the planner has them, with what was refused.
        source: what the model was read from.
        seconds: that finding them took.
    """

    found: Plans
    source: str
    seconds: float

    @property
    def request(self) -> Request:
        """The question."""
        return self.found.request

    @property
    def plans(self) -> tuple[PlanEntry, ...]:
        """Best first."""
        return tuple(
            PlanEntry(number, item, self.request) for number, item in enumerate(self.found.plans, start=1)
        )

    @property
    def best(self) -> PlanEntry:
        """The first: the fastest that training runs, unless it runs none."""
        return self.plans[0]

    @property
    def warnings(self) -> list[str]:
        """What a reader must know, with codes."""
        return warnings_of(self.found)

    def rejected(self, fixed: str) -> Answer:
        """Why a plan with these keys is not the first: `rejected("tp=16")`, as `meshwright explain "why not tp=16"`.

        Raises:
            ConfigError: E288 for what are no keys.
        """
        return self._asked(f"why not {fixed}")

    def compare(self, first: int, other: int) -> Answer:
        """Two plans by their numbers, from 1, as `meshwright explain "1 vs 3"`.

        Raises:
            ConfigError: E288 for a number that there is not.
        """
        return self._asked(f"{first} vs {other}")

    def pareto(self) -> Picture:
        """Time against memory: layouts than which no other has less of both."""
        return draw_front(self.found)

    def gantt(self, number: int = 1) -> Picture:
        """The schedule of a plan's pipeline over time; without a pipeline, its micro-batches one after the other.

        Raises:
            ConfigError: E288 for a number that there is not.
        """
        if not 1 <= number <= len(self.plans):
            raise ConfigError(
                "E288", f"plan {number}: there are plans 1 to {len(self.plans)}; write e.g. gantt(1)"
            )
        return draw_schedule(self.request, self.plans[number - 1].layout)

    def table(self, tokens: str | float | None = None, *, usd_per_gpu_hour: float | None = None) -> str:
        """As `meshwright plan` prints it; with days, and dollars for a price, where tokens are given.

        Raises:
            ConfigError: E102 for tokens without a legal unit, E285 for a price without tokens.
        """
        if usd_per_gpu_hour is not None and tokens is None:
            raise ConfigError(
                "E285",
                f'usd_per_gpu_hour={usd_per_gpu_hour:g} needs the length of the run, e.g. "100B tokens"',
            )
        number = parse_tokens(tokens, name="tokens") if isinstance(tokens, str) else tokens
        return "\n".join(table_lines(self.found, self.seconds, Spending(number, usd_per_gpu_hour)))

    def to_json(self) -> dict[str, object]:
        """As `meshwright plan --json`, without what is not of the plans."""
        return self.found.to_json()

    def save(self, path: str | Path = LOCK_NAME) -> Path:
        """Write the file that `plan.lock` names and `meshwright explain` reads."""
        save_lock(Path(path), self.found, source=self.source)
        return Path(path)

    def lock(self) -> dict[str, object]:
        """What `save` writes."""
        return lock_value(self.found, source=self.source)

    def offered(self) -> Offered:
        """The plans as `train` takes them."""
        return Offered(
            self.lock(), "the plan of meshwright.plan", "Call meshwright.plan again, or leave plan= out"
        )

    def runnable(self) -> PlanEntry:
        """The first that training runs.

        Raises:
            PlanError: E298 where it runs none.
        """
        return self.plans[first_runnable(self.offered()).number - 1]

    def _asked(self, question: str) -> Answer:
        return answer_about(question, self.request, [item.predicted for item in self.found.plans])

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return plans_table(self.found)
