"""`meshwright partition`: a model, a graph or a file of blocks cut into stages for so many devices.

Owns the options and the printed answer. Must not know the algorithms (`partitioning/`). Starts without torch; a model
that must be captured needs it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from meshwright.cli.output import print_json
from meshwright.errors import ConfigError, writing
from meshwright.graph.task_graph import TaskGraph
from meshwright.partitioning.alternatives import (
    MOST_TIES,
    best_order,
    best_order_by,
    best_ties,
    best_ties_by,
)
from meshwright.partitioning.blocks_file import read_blocks
from meshwright.partitioning.chain import shares_of
from meshwright.partitioning.draw import Pane, as_svg, as_text, stages_pane
from meshwright.partitioning.draw_model import graph_pane, steps_pane
from meshwright.partitioning.graph_costs import GraphCosts, Measured, Roofline
from meshwright.partitioning.model_plan import (
    MOST_BLOCKS,
    ModelPlan,
    blocks_by_cuts,
    plan_model,
    plan_model_rannc,
)
from meshwright.partitioning.partition import Mode, Partition, partition_chain
from meshwright.partitioning.stage_costs import OBJECTIVES, Group, Objective, Problem, Replicas
from meshwright.presets.machines import find_machine

# What a kernel reaches of a device's peak, and seconds to start one.
_EFFICIENCY, _TASK_SECONDS = 0.5, 5e-6
# Weights, gradients and two moments of Adam, in the weights' own type.
_STATES = 4.0
# All orders of kinds are searched.
_MOST_KINDS = 4


def partition(  # noqa: PLR0913 - each is an option of the command
    source: Annotated[
        str,
        typer.Argument(help="blocks.json, or a model: a preset, hf:PLACE, py:MODULE:FUNCTION, .onnx, .json."),
    ],
    devices: Annotated[int, typer.Option(min=1, help="All are used.")],
    stages: Annotated[str | None, typer.Option(help="How many: A, or A..B. Without it: any.")] = None,
    replicas: Annotated[str, typer.Option(help="Devices of a stage: any, or pow2.")] = "any",
    objective: Annotated[
        str | None, typer.Option(help="maxf+maxb, maxfb or 1f1b. Blocks: maxf+maxb; models: 1f1b.")
    ] = None,
    memory: Annotated[float | None, typer.Option(help="Bytes of a device.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Bytes per second between devices.")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Of a step. Models: searched.")] = None,
    compat: Annotated[str | None, typer.Option(help="rannc: the plan that RaNNC's algorithm gives.")] = None,
    recompute: Annotated[bool, typer.Option(help="Backward computes a stage's forward again.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a step (models).")] = 64,
    sequence: Annotated[int, typer.Option(min=1, help="Positions (models).")] = 128,
    machine: Annotated[str, typer.Option(help="A machine preset (models).")] = "a100-80",
    speeds: Annotated[
        str | None,
        typer.Option(help="Of each device, e.g. 1,1,2,2: the best order of kinds is found."),
    ] = None,
    ties: Annotated[
        str, typer.Option(help="Shared weights: copied where needed, or best: also in one stage.")
    ] = "copied",
    costs: Annotated[str, typer.Option(help="roofline, or measured: of blocks, here (models).")] = "roofline",
    out: Annotated[
        Path | None, typer.Option(help="Write the pictures as SVG here: graph, blocks, stages.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Cut a model into balanced stages with replicas; the answer says how far from the best it can be at most."""
    started = time.perf_counter()
    rules = Problem(
        shares={},
        groups=(Group(devices, 1.0, memory or math.inf, bandwidth or math.inf),),
        stages=_range(stages, devices),
        objective=cast(Objective, _one_of("--objective", objective or "maxf+maxb", OBJECTIVES)),
        replicas=cast(Replicas, _one_of("--replicas", replicas, get_args(Replicas))),
        num_microbatches=microbatches or 1,
        recompute=recompute,
    )
    mode = cast(Mode, "exact" if compat is None else _one_of("--compat", compat, ("rannc",)))
    is_measured = _one_of("--costs", costs, ("roofline", "measured")) == "measured"
    model: ModelPlan | None = None
    panes: list[Pane] = []
    more: dict[str, object] = {}
    raw = _blocks_text(source)
    if raw is not None:
        if is_measured:
            raise ConfigError("E109", "--costs measured is of models: a file of blocks has its own seconds")
        chain = read_blocks(raw, where=source)
        rules = dataclasses.replace(
            rules, shares=shares_of(chain, devices), groups=_groups(speeds, rules.groups[0])
        )
        found, more = _of_blocks(rules, mode, _one_of("--ties", ties, ("copied", "best")))
        labels = tuple(block.name or f"block {number}" for number, block in enumerate(chain.blocks))
    else:
        if objective not in (None, "1f1b") and mode == "exact":
            raise ConfigError(
                "E109", f"--objective {objective}: models are planned by the seconds of a step, 1f1b"
            )
        graph = _graph(source, (min(batch, 2), sequence))
        priced, rules = _of_model(
            graph, sequence, machine, rules, (memory, bandwidth), is_measured=is_measured
        )
        rules = dataclasses.replace(rules, groups=_groups(speeds, rules.groups[0]))
        counts = () if microbatches is None else (microbatches,)
        solve = partial(plan_model, priced, batch=batch, num_microbatches=counts)
        ties = _one_of("--ties", ties, ("copied", "best"))
        _check_alternatives(rules, mode, ties)
        if mode == "rannc":
            model = plan_model_rannc(priced, rules, batch=batch)
        else:
            model, more = _of_alternatives(solve, rules, priced, ties)
        found = model.partition
        labels = tuple(priced.label(members) for members in model.levels[-1].blocks)
        panes = [graph_pane(priced), steps_pane(priced, model)]
    facts = {**_facts(found, model), **more, "seconds": time.perf_counter() - started}
    if out is not None:
        with writing(out):
            out.write_text(as_svg(*panes, stages_pane(found, labels)), encoding="utf-8")
    if json_output:
        print_json({**facts, "out": None if out is None else str(out)})
    else:
        print(as_text(found, labels) if out is None else f"wrote {out}")


def _facts(found: Partition, model: ModelPlan | None) -> dict[str, object]:
    facts: dict[str, object] = {
        "stages": [
            {**dataclasses.asdict(stage), "ranks": list(ranks)}
            for stage, ranks in zip(found.stages, found.ranks, strict=True)
        ],
        "objective": found.objective,
        "mode": found.mode,
        "value": found.value,
        "optimum": found.optimum,
        "bound": found.bound,
        "gap": found.gap,
        "imbalance": found.imbalance,
        "blocks": found.num_blocks,
        "atomic": None if model is None else model.num_atomic,
        "num_microbatches": found.num_microbatches,
        "recompute": found.recompute,
        "notes": list(found.notes),
    }
    if model is not None:
        facts |= {
            "batch": model.batch,
            "copies": model.copies,
            "step_seconds": model.step_seconds,
            "step_gap": model.gap,
            "modules": [list(stage.modules) for stage in model.stages],
        }
    return facts


def _groups(speeds: str | None, alike: Group) -> tuple[Group, ...]:
    """Kinds of devices, in the order of their first one."""
    if speeds is None:
        return (alike,)
    try:
        numbers = [float(speed) for speed in speeds.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != alike.count or not all(0 < number < math.inf for number in numbers):
        raise ConfigError(
            "E109", f"--speeds {speeds}: a number above 0 for each of {alike.count} devices, e.g. 1,1,2,2"
        )
    counts = Counter(numbers)
    if len(counts) > _MOST_KINDS:
        raise ConfigError(
            "E109", f"--speeds {speeds}: at most {_MOST_KINDS} different ones, all orders are tried"
        )
    return tuple(dataclasses.replace(alike, count=count, speed=speed) for speed, count in counts.items())


def _of_blocks(rules: Problem, mode: Mode, ties: str) -> tuple[Partition, dict[str, object]]:
    """The plan, and what was chosen besides."""
    _check_alternatives(rules, mode, ties)
    if ties == "best":
        _check_ties(len(next(iter(rules.shares.values())).ties))
        found, together = best_ties(rules)
        return found, {"ties_in_one_stage": list(together)}
    if len(rules.groups) > 1:
        found, order = best_order(rules)
        return found, {"speeds": _speeds(rules, order, found)}
    return partition_chain(rules, mode=mode), {}


def _of_alternatives(
    solve: Callable[[Problem], ModelPlan], rules: Problem, priced: GraphCosts, ties: str
) -> tuple[ModelPlan, dict[str, object]]:
    """The plan of a model, and what was chosen besides."""
    if ties == "best":
        level = blocks_by_cuts(priced, MOST_BLOCKS)
        shared = priced.chain(level, priced.graph.batch).ties
        _check_ties(len(shared))
        model, together = best_ties_by(
            rules, shared, solve, lambda plan: (plan.step_seconds or 0.0, plan.partition)
        )
        return model, {"ties_in_one_stage": [shared[i].name for i in together]}
    if len(rules.groups) > 1:
        model, order = best_order_by(rules, solve, lambda plan: plan.step_seconds or 0.0)
        return model, {"speeds": _speeds(rules, order, model.partition)}
    return solve(rules), {}


def _check_alternatives(rules: Problem, mode: Mode, ties: str) -> None:
    if (ties == "best" or len(rules.groups) > 1) and mode == "rannc":
        raise ConfigError("E109", "--compat rannc knows one kind of device, and copies shared weights")
    if ties == "best" and len(rules.groups) > 1:
        raise ConfigError("E109", "--speeds and --ties best are answered one at a time")


def _check_ties(count: int) -> None:
    if count > MOST_TIES:
        raise ConfigError("E109", f"--ties best of {count} shared weights; at most {MOST_TIES}")


def _speeds(rules: Problem, order: tuple[int, ...], found: Partition) -> list[float]:
    """Of the devices of each stage."""
    return [rules.groups[order[stage.group]].speed for stage in found.stages]


def _graph(source: str, sizes: tuple[int, int]) -> TaskGraph:
    from meshwright.cli.draw_graph import read_graph

    return read_graph(source, (max(2, sizes[0]), sizes[1]))


def _measured(graph: TaskGraph, sequence: int) -> Measured:
    from meshwright.cli.train import require_torch

    require_torch()
    from meshwright.capture.profile import measured_seconds
    from meshwright.training.config import default_cache_dir

    return measured_seconds(graph, default_cache_dir(), sequence=sequence)


def _of_model(
    graph: TaskGraph,
    sequence: int,
    machine: str,
    rules: Problem,
    given: tuple[float | None, float | None],
    *,
    is_measured: bool,
) -> tuple[GraphCosts, Problem]:
    """Costs by the machine's roofline or measured, and the rules with its memory and its network."""
    device = find_machine(machine)
    types = {value.dtype for value in graph.values if value.kind == "parameter"}
    peak = device.flops.get({"bfloat16": "bf16", "float16": "fp16"}.get(min(types, default=""), "fp32"))
    peak = peak or max(device.flops.values())
    roofline = Roofline(peak * _EFFICIENCY, device.memory_bandwidth, _TASK_SECONDS)
    links = [link.bandwidth_bytes_per_second for link in device.links.values()]
    group = Group(
        rules.num_devices,
        1.0,
        given[0] or 0.9 * device.memory_bytes,
        given[1] or min(links, default=math.inf),
    )
    sequence = sequence if "sequence" in graph.free else 0
    measured = _measured(graph, sequence) if is_measured else None
    priced = GraphCosts(graph, roofline, sequence=sequence, measured=measured)
    return priced, dataclasses.replace(rules, groups=(group,), resident=_STATES)


def _blocks_text(source: str) -> str | None:
    """The text of a file of blocks; None for anything else."""
    path = Path(source)
    if path.suffix != ".json":
        return None
    if not path.is_file():
        raise ConfigError("E100", f"{source}: there is no such file")
    text = path.read_text(encoding="utf-8")
    try:
        raw = json.loads(text)
    except ValueError:
        return text  # read_blocks says what is wrong
    return None if isinstance(raw, dict) and "tasks" in raw else text


def _range(text: str | None, devices: int) -> tuple[int, int]:
    if text is None:
        return 1, devices
    first, _, last = text.partition("..")
    if not (first.isdigit() and (last or first).isdigit() and 1 <= int(first) <= int(last or first)):
        raise ConfigError("E109", f"--stages {text}: a number or a range of them, e.g. 4 or 2..8")
    return int(first), int(last or first)


def _one_of(option: str, value: str, legal: tuple[str, ...]) -> str:
    if value not in legal:
        raise ConfigError("E109", f"{option} {value} is neither of {', '.join(legal)}")
    return value
