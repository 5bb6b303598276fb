"""`meshwright simulate`: the price of one given plan on a cluster, or of a table of published runs.

Owns the options and the text. Must not import torch.
"""

from __future__ import annotations

import csv
import gzip
import sys
from dataclasses import asdict, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.output import print_json
from meshwright.errors import EXIT_DOES_NOT_FIT, ConfigError, writing
from meshwright.launching.plan import read_model
from meshwright.launching.this_host import located
from meshwright.planner.asking import job_of
from meshwright.planner.request import Request
from meshwright.planner.rules import NOTHING_TO_SHARE, refuse_layout, refuse_mesh
from meshwright.schedule.draw import as_svg
from meshwright.simulation.job import Cluster, Layout, Workload, check_job, num_microbatches
from meshwright.simulation.pipeline import planned_pipeline
from meshwright.simulation.prediction import Prediction, percent_text, predict
from meshwright.simulation.published import Row
from meshwright.simulation.reading import layout_of, parse_layout, plan_values, read_run
from meshwright.simulation.scoring import Calls, Errors, calls, errors_by_source, score_rows, skipped
from meshwright.simulation.trace import as_trace
from meshwright.training.config import default_cache_dir

_SHIPPED = "published_runs.csv"
_DIMENSIONS = (
    *("dp", "tp", "pp", "cp", "zero", "sequence_parallel", "schedule", "chunks", "recompute", "micro_batch"),
    *("cp_kind", "half_layers"),
)
_NEEDED = ("hardware", "gpus", "hidden", "layers", "seq_len", "global_batch")


def simulate(  # noqa: PLR0913 - each is an option of the command
    source: Annotated[
        str | None, typer.Argument(help="run.toml or a model preset; with --published none.")
    ] = None,
    cluster: Annotated[str, typer.Option(help="COUNTxMACHINE, e.g. 64xh100, or cluster.toml.")] = "",
    plan: Annotated[str, typer.Option(help='Keys of the plan, e.g. "tp=8,pp=4,zero=1".')] = "",
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence.")] = None,
    batch: Annotated[str | None, typer.Option(help='Sequences of a step, e.g. "512 sequences".')] = None,
    published: Annotated[
        str | None, typer.Option(help='A table of published runs; "shipped" is our own.')
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the table with predictions goes.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the pipeline, event by event.")] = None,
    trace: Annotated[Path | None, typer.Option(help="The same for Perfetto: .json or .json.gz.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Price one plan, or a table of published runs."""
    if published is not None:
        _price_table(published, out, json_output=json_output)
        return
    if source is None:
        raise ConfigError("E282", "simulate needs a model and --cluster, e.g. gpt3-175b --cluster 1024xa100")
    work, layout, where = _read(source, cluster, plan, seq=seq, batch=batch)
    check_job(work, layout, where)
    _check_rules(work, layout, where)
    where = _at_home(work, layout, where)
    found = predict(work, layout, where)
    warnings = _warnings(found, work, where)
    drawn = _draw(work, layout, where, svg=svg, trace=trace) if svg or trace else {}
    if json_output:
        print_json({**found.to_json(), **drawn, "warnings": warnings})
    else:
        print(_text(found, work, where))
        if drawn:
            seconds, waiting = drawn["pipeline_seconds"], drawn["pipeline_bubble"]
            files = " ".join(str(path) for path in (svg, trace) if path)
            print(f"events   {seconds:.4g} s of pipeline, {waiting:.1%} of it waiting · wrote {files}")
    for warning in warnings:
        print(warning, file=sys.stderr)
    if not found.fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _draw(
    work: Workload, layout: Layout, where: Cluster, *, svg: Path | None, trace: Path | None
) -> dict[str, float]:
    """Files of the plan's pipeline; seconds of it and the part that ranks wait, event by event."""
    if layout.pp == 1:
        raise ConfigError("E283", "plan.pp=1 has no pipeline to draw; take pp=2 or more, or leave --svg out")
    made = planned_pipeline(work, layout, where)
    if svg is not None:
        with writing(svg):
            svg.write_text(as_svg(made.schedule, made.machinery.durations), encoding="utf-8")
    if trace is not None:
        written = as_trace(made.lowered, made.timeline, made.machinery).encode()
        with writing(trace):
            trace.write_bytes(gzip.compress(written, mtime=0) if trace.suffix == ".gz" else written)
    return {"pipeline_seconds": made.timeline.seconds, "pipeline_bubble": made.timeline.bubble}


def _read(
    source: str, cluster: str, plan: str, *, seq: int | None, batch: str | None
) -> tuple[Workload, Layout, Cluster]:
    run = read_run(Path(source)) if source.endswith(".toml") else {}
    section = run.get("model", {})
    named = str(section.get("source", "preset:gpt-nano")) if run else source
    # Files and presets are read without running anything; what a py: model is, its process says.
    sections, model = read_model(named.removeprefix("hf:") if named.startswith("hf:") else named)
    keys = {**run.get("plan", {}), **({"cluster": cluster} if cluster else {})}
    about = {**run, "model": {**section, **sections.get("model", {})}}
    work, where = job_of(about, keys, seq=seq, batch=batch, model=model)
    precision = "fp32" if where.machine.name == "cpu" else "bf16"
    layout = layout_of(keys, start=Layout(micro_batch=1, precision=precision), num_devices=where.num_devices)
    if plan:
        layout = parse_layout(plan, start=layout, num_devices=where.num_devices)
    if run and "micro_batch" not in {**keys, **plan_values(plan)}:
        # As training takes it: all of a rank's samples at once.
        layout = replace(layout, micro_batch=max(1, work.global_batch // layout.dp))
    if layout.precision == "fp8" and "fp8" not in where.machine.flops:
        raise ConfigError("E283", f"plan.precision='fp8': {where.machine.name} has no fp8; take bf16")
    return work, layout, where


def _check_rules(work: Workload, layout: Layout, where: Cluster) -> None:
    """The rules by which a search refuses layouts, but for the batch, which W282 is about; E281 with this layout's
    numbers."""
    taken = layout.dp * layout.micro_batch * num_microbatches(work, layout)
    degrees = {"tp": layout.tp, "hsdp": layout.shard // layout.cp}
    request = Request(replace(work, global_batch=taken), where, degrees)
    refused = refuse_mesh(request, layout) or refuse_layout(request, layout)
    # Sharing over one rank is no plan that anybody searches for, and harmless.
    if refused is not None and refused.reason != NOTHING_TO_SHARE:
        raise ConfigError(
            "E281", f"{refused.detail} ({refused.reason}); `meshwright plan` finds degrees that are legal"
        )


def _at_home(work: Workload, layout: Layout, where: Cluster) -> Cluster:
    """This host as it was measured, where its processes are the cluster; measured for this plan if torch is here."""
    if where.machine.name != "cpu":
        return where
    fixed = {**{name: getattr(layout, name) for name in _DIMENSIONS}, "hsdp": layout.shard // layout.cp}
    request = Request(work, where, fixed, base=layout)
    return located(request, default_cache_dir(), measures=find_spec("torch") is not None).cluster


def _warnings(found: Prediction, work: Workload, where: Cluster) -> list[str]:
    texts = []
    if not found.fits:
        need, has = found.memory.peak / 2**30, where.machine.memory_bytes / 2**30
        texts.append(
            f"W280 does not fit: {need:.1f} GiB of {has:.0f}; more of tp, pp or zero, a smaller micro_batch, or "
            "recompute=full"
        )
    if not found.is_fitted:
        texts.append(
            f"W281 {where.machine.name} has no constants of its own yet: those of the nearest machine are taken"
        )
    layout = found.layout
    taken = layout.dp * layout.micro_batch * num_microbatches(work, layout)
    if taken != work.global_batch:
        texts.append(
            f"W282 a batch of {work.global_batch} is priced as {taken}: dp x micro_batch = "
            f"{layout.dp * layout.micro_batch} does not divide it"
        )
    return texts


def _text(found: Prediction, work: Workload, where: Cluster) -> str:
    own, step, memory = found.layout, found.step, found.memory
    seconds = {key: value for key, value in asdict(step).items() if value and key != "recompute"}
    held = {key: value for key, value in asdict(memory).items() if value}
    degrees = f"pp {own.pp} · dp {own.dp} · cp {own.cp} · tp {own.tp} · zero {own.zero}"
    lines = [
        f"model    {work.model.name} · {work.seq_len} tokens x {work.global_batch} sequences a step",
        f"cluster  {where.num_devices} x {where.machine.name}, {where.devices_per_node} a node",
        f"plan     {degrees} · {own.schedule} · micro {own.micro_batch} x {found.num_microbatches} · "
        f"recompute {own.recompute}",
        f"step     {step.total:.3g} s · {found.tokens_per_second_per_device:,.0f} tokens/s a device · "
        f"MFU {percent_text(found.mfu)} · HFU {percent_text(found.hfu)}",
        "         " + " · ".join(f"{key} {value:.3g} s" for key, value in seconds.items()),
        f"memory   {memory.peak / 2**30:.1f} GiB of {where.machine.memory_bytes / 2**30:.0f}",
        "         " + " · ".join(f"{key} {value / 2**30:.2f} GiB" for key, value in held.items()),
    ]
    return "\n".join(lines)


def _price_table(name: str, out: Path | None, *, json_output: bool) -> None:
    rows = _rows(name)
    scored = score_rows(rows)
    if out is not None:
        with writing(out), out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(scored[0].row))
            writer.writeheader()
            writer.writerows(item.row for item in scored)
    errors, reasons = errors_by_source(scored), skipped(scored)
    if json_output:
        sources = [asdict(item) for item in errors]
        print_json({"rows": len(rows), "sources": sources, "fits": asdict(calls(scored)), "skipped": reasons})
        return
    print(f"{'source · machine':48s} {'rows':>5s} {'median':>7s} {'90 %':>7s} {'memory':>7s}")
    for item in errors:
        print(_line(item))
    print(_calls_text(calls(scored)))
    print(f"skipped {sum(reasons.values())} of {len(rows)} rows")
    for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1]):
        print(f"  {count:4d}  {reason}")


def _calls_text(found: Calls) -> str:
    return (
        f"out of memory is said of {found.failed_called} of {found.failed} runs that failed so, "
        f"and of {found.ran_called} of {found.ran} that ran"
    )


def _line(item: Errors) -> str:
    figures = (item.median_time, item.p90_time, item.median_memory)
    texts = " ".join(f"{'' if value is None else f'{100 * value:.1f} %':>7s}" for value in figures)
    return f"{item.source:48s} {item.num_times:5d} {texts}"


def _rows(name: str) -> list[Row]:
    try:
        if name == "shipped":
            text = (files("meshwright.simulation") / _SHIPPED).read_text(encoding="utf-8")
        else:
            text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "E284", f"{name} cannot be read: {error}; --published shipped is our own"
        ) from error
    reader = csv.DictReader(text.splitlines())
    rows: list[Row] = [dict(row) for row in reader]
    lacking = [column for column in _NEEDED if column not in (reader.fieldnames or ())]
    if lacking or not rows:
        what = f"lacks {', '.join(lacking)}" if lacking else "has no rows"
        raise ConfigError(
            "E284", f"{name} {what}; columns are those of `--published shipped --out table.csv`"
        )
    return rows
