"""`meshwright draw --schedule`: a pipeline schedule over time, as text, SVG or CSV, and its planned step as a trace.

Owns how stage times and replicas are written on the command line.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import ConfigError, writing
from meshwright.schedule.action import SENDS, Schedule, to_text
from meshwright.schedule.catalogue import make_schedule
from meshwright.schedule.check import peak_in_flight
from meshwright.schedule.draw import as_svg, as_text
from meshwright.schedule.lower import lower
from meshwright.schedule.reading import read_schedule
from meshwright.schedule.replicas import replicas_of
from meshwright.schedule.timing import Durations, bubble_of
from meshwright.simulation.machinery import Machinery, Wire
from meshwright.simulation.timeline import simulate
from meshwright.simulation.trace import as_trace

_FILES = (".csv", ".txt")


@dataclass(frozen=True)
class Pipeline:
    """What the command line says of a pipeline.

    Attributes:
        name: of the schedule, or a file with one of one's own; that needs no other numbers.
        stages: ranks of the pipeline.
        microbatches: of a step.
        chunks: stages a rank.
        times: "F/I/W" in seconds, one for all stages or one a stage.
        transfer: seconds of a message.
        keep: most activations that a rank keeps; None: any.
        replicas: ranks in the place of each rank, e.g. "1,2,2,1".
        samples: of a micro-batch.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int | None
    times: str | None
    transfer: float
    keep: int | None
    replicas: str | None
    samples: int | None


def draw_schedule(pipeline: Pipeline, *, csv: bool, trace: Path | None) -> tuple[str, str, dict[str, object]]:
    """Text, SVG or CSV, and figures of a schedule; its trace is written to `trace`.

    Raises:
        ConfigError: E109 for times or replicas that cannot be read.
        PlanError: E230 to E234.
    """
    made, times = _made(pipeline)
    stage_ranks = _stage_ranks(made, pipeline)
    samples = pipeline.samples if pipeline.samples is not None else max(map(len, stage_ranks))
    lowered = lower(made, replicas=replicas_of(made, stage_ranks, samples=samples))
    machinery = Machinery(times, Wire(latency=pipeline.transfer))
    timeline = simulate(lowered, machinery)
    if trace is not None:
        written = as_trace(lowered, timeline, machinery).encode()
        with writing(trace):
            trace.write_bytes(gzip.compress(written, mtime=0) if trace.suffix == ".gz" else written)
    messages = sum(action.op in SENDS for program in lowered.programs for action in program)
    facts: dict[str, object] = {
        "schedule": made.name,
        "ranks": made.num_ranks,
        "stages": made.num_stages,
        "microbatches": made.num_microbatches,
        "bubble": bubble_of(made, times),
        "seconds": timeline.seconds,
        "activations": peak_in_flight(made),
        "programs": [[str(action) for action in program] for program in made.programs],
        "stage_ranks": stage_ranks,
        "messages": messages,
        "trace": None if trace is None else str(trace),
    }
    lines = [as_text(made, times)]
    if pipeline.replicas is not None:
        held = " · ".join(f"stage {s} on {' '.join(map(str, ranks))}" for s, ranks in enumerate(stage_ranks))
        lines.append(f"{held} · {samples} samples a micro-batch · {messages} messages")
    if trace is not None:
        lines.append(f"wrote {trace}")
    return "\n".join(lines), to_text(made, csv=True) + "\n" if csv else as_svg(made, times), facts


def _made(pipeline: Pipeline) -> tuple[Schedule, Durations]:
    """The schedule, a searched one for its times, and the times."""
    name, sizes = pipeline.name, (pipeline.stages, pipeline.microbatches)
    if Path(name).suffix in _FILES:
        if not Path(name).is_file():
            raise ConfigError("E109", f"--schedule {name}: there is no such file")
        made = read_schedule(Path(name).read_text(encoding="utf-8"), name=Path(name).name)
        return made, _durations(pipeline, made.num_stages)
    if not 0 <= pipeline.transfer < float("inf"):
        raise ConfigError("E109", f"--transfer {pipeline.transfer}: seconds of a message, 0 or more")
    if name == "searched" and min(*sizes, pipeline.chunks or 1) > 0:
        times = _durations(pipeline, pipeline.stages * (pipeline.chunks or 1))
        return make_schedule(
            name, *sizes, num_chunks=pipeline.chunks, durations=times, keep=pipeline.keep
        ), times
    made = make_schedule(name, *sizes, num_chunks=pipeline.chunks, keep=pipeline.keep)
    return made, _durations(pipeline, made.num_stages)


def _durations(pipeline: Pipeline, num_stages: int) -> Durations:
    text = pipeline.times or "1/1/1"
    try:
        rows = [tuple(map(float, entry.split("/"))) for entry in text.split(",")]
    except ValueError:
        rows = []
    rows = rows * num_stages if len(rows) == 1 else rows
    is_right = all(len(row) == 3 and all(0 < second < float("inf") for second in row) for row in rows)
    if len(rows) != num_stages or not is_right:
        raise ConfigError(
            "E109",
            f"--times {text}: write forward/input gradient/weight gradient in seconds above 0, one for all stages or "
            f"one for each of the {num_stages}, e.g. 1/1/1 or {','.join(['1/1/0.5'] * num_stages)}",
        )
    forward, inputs, weights = (tuple(column) for column in zip(*rows, strict=True))
    return Durations(forward, inputs, weights, pipeline.transfer)


def _stage_ranks(made: Schedule, pipeline: Pipeline) -> list[list[int]]:
    """The ranks of each stage, numbered along the pipeline."""
    text = pipeline.replicas if pipeline.replicas is not None else ",".join(["1"] * made.num_ranks)
    entries = text.split(",")
    if len(entries) != made.num_ranks or not all(
        entry.strip().isdecimal() and int(entry) for entry in entries
    ):
        raise ConfigError(
            "E109",
            f"--replicas {text}: write how many ranks share the work of each of the {made.num_ranks} ranks of the "
            f"pipeline, e.g. {','.join(['2'] * made.num_ranks)}",
        )
    sizes = list(map(int, entries))
    teams = [list(range(sum(sizes[:place]), sum(sizes[: place + 1]))) for place in range(made.num_ranks)]
    return [teams[place] for place in made.placement[0]]
