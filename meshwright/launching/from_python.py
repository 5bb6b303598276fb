"""`meshwright.train(...)`: a run file, a configuration, or a model, its loss and its data as Python objects.

Owns how objects become a configuration, and that they travel to workers by cloudpickle. A module that is given with
its weights is copied to every rank; what is learned is in the run's checkpoints, not in the caller's module. What
`meshwright.hf` returned, with data that is named, is a run of `hf:`, whose weights each rank reads for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from meshwright.errors import ConfigError
from meshwright.launching.jobs import launch_config, plan_of_run
from meshwright.launching.plan import name_of
from meshwright.launching.plan_result import PlanResult
from meshwright.launching.planned import FromPython
from meshwright.launching.shapes import shape_of_object
from meshwright.reporting.page import write_report
from meshwright.reporting.reading import read_run
from meshwright.training.config import Resolved, RunConfig, load_config
from meshwright.training.units import split_at_commas, toml_literal
from meshwright.verification.job import Functions

if TYPE_CHECKING:
    from meshwright.training.hf import HfBuild

Sections = dict[str, dict[str, Any]]


class TrainOptions(TypedDict, total=False):
    """What `train` may be told beside texts `a.b=c`.

    Keys:
        loss: (model, batch) -> (sum, count), or a bare scalar that is a mean over samples; of a model.
        data: map-style dataset whose items torch's default collate stacks; of a model. With what `meshwright.hf`
            returned also a text, as `data.train`.
        plan: `auto`, keys of the run file's `plan` table (`pp=2,zero=1`), or what `meshwright.plan` returned: then
            batch, sequence length and processes are those of the plan where nothing else is said.
        processes: local ranks.
        cluster: where, as `plan.cluster`, or "local", "local:4" for processes of this host; without a plan one is
            searched.
        global_batch: samples of a step.
        stop_at: as `train.stop_at`: "2000 steps", "60 s".
        out: run folder.
    """

    loss: Callable[[Any, Any], Any]
    data: Any
    plan: str | PlanResult
    processes: int
    cluster: str
    global_batch: int
    stop_at: str
    out: str | Path


class RunResult(dict[str, Any]):
    """The contract's result, as `meshwright train --json` prints it; empty on other ranks than the first."""

    def report(self, out: str | Path | None = None) -> Path:
        """Write the run folder as one HTML page, as `meshwright report`; returns where it is.

        Raises:
            ConfigError: E297 where it cannot be written.
        """
        return write_report([read_run(Path(self["run_dir"]))], None if out is None else Path(out))


def train(
    source: str | Path | RunConfig | tuple[Any, ...] | Callable[[], Any],
    *overrides: str,
    resume: str | None = None,
    **options: Unpack[TrainOptions],
) -> RunResult:
    """Train from Python: a run file, or `meshwright.train(Net, loss=loss_fn, data=dataset, plan="auto")`.

    Args:
        source: a run file, a configuration, a module, a function that makes one, the same at each call, or what
            `meshwright.hf` returned.
        *overrides: texts `a.b=c`.
        resume: `auto`, or a run folder or checkpoint to go on from.
        **options: see `TrainOptions`.

    Returns:
        The contract's result, as `meshwright train --json` prints it; `.report()` makes a page of it.

    Raises:
        MeshwrightError: as the command line prints it; E111 for a model without loss or data; E293 for a plan that was
            made for something else.
    """
    functions = _functions(source, options)
    resolved = _resolved(source, [*_texts(options), *overrides], options, functions)
    plan = options.get("plan")
    offered = plan.offered() if isinstance(plan, PlanResult) else None
    found = None
    if offered is not None or resolved.config.plan.lock is not None:
        shape = None if functions is None else shape_of_object(functions.build)
        found = plan_of_run(resolved, FromPython(offered, shape))
    return RunResult(
        launch_config(resolved, json_output=True, resume=resume, functions=functions, plan=found)
    )


def _resolved(source: Any, texts: list[str], options: TrainOptions, functions: Functions | None) -> Resolved:
    """The configuration; what a plan says of batch and sequence counts less than anything else that is said."""
    plan = options.get("plan")
    built_in = _sizes(plan) if isinstance(plan, PlanResult) else {}
    if isinstance(source, str | Path):
        return load_config(Path(source), texts, built_in=built_in, built_in_name="meshwright.plan")
    if isinstance(source, RunConfig):
        own = source.model_dump(mode="json", exclude_unset=True)
        return load_config(None, texts, built_in=_merged(built_in, own), built_in_name="RunConfig")
    model = {"source": name_of(source)}
    own = {"model": model} if functions is not None else _sections_of_hf(source[0], options["data"])
    return load_config(None, texts, built_in=_merged(built_in, own), built_in_name="meshwright.train")


def _sections_of_hf(build: HfBuild, data: str) -> Sections:
    """What a run file would say of a model of transformers and of named data."""
    values = {"source": f"hf:{build.place}", "init": build.init, "task": build.task, **build.sizes}
    return {
        "model": {key: value for key, value in values.items() if value is not None},
        "data": {"train": data},
    }


def _sizes(plan: PlanResult) -> Sections:
    work = plan.request.work
    return {"train": {"global_batch": work.global_batch}, "data": {"seq_len": work.seq_len}}


def _merged(less: Sections, more: Sections) -> Sections:
    return {name: {**less.get(name, {}), **more.get(name, {})} for name in {**less, **more}}


def _functions(source: Any, options: TrainOptions) -> Functions | None:
    """The objects that travel to workers; None where a configuration says all."""
    if isinstance(source, str | Path | RunConfig):
        return None
    if isinstance(source, tuple):  # of meshwright.hf
        if isinstance(options.get("data"), str) and "loss" not in options:
            return None
        build, loss = source
        source, options = build, {"loss": loss, **options}
    missing = [name for name in ("loss", "data") if name not in options]
    if missing or not callable(source):
        raise ConfigError(
            "E111",
            f"meshwright.train({type(source).__name__}) needs loss= and data= as well: "
            f'meshwright.train(lambda: Net(64), loss=loss_fn, data=dataset, plan="auto")',
        )
    if isinstance(options["data"], str):
        raise ConfigError(
            "E111",
            f"data={options['data']!r}: a model with a loss of its own needs a dataset, whose items its loss reads; "
            f"data that is named goes with a run file, or with what meshwright.hf returned",
        )
    from torch import nn  # whoever has a model has torch; a launcher must not load it

    if isinstance(source, nn.Module):
        return Functions(lambda: source, options["loss"], options["data"])
    return Functions(source, options["loss"], options["data"])


def _texts(options: TrainOptions) -> list[str]:
    plan = options.get("plan", "")
    texts = []
    if not isinstance(plan, PlanResult):
        texts = ["plan.mode=auto"] if plan == "auto" else [f"plan.{part}" for part in split_at_commas(plan)]
    texts += _texts_of_cluster(options)
    keys = {
        "processes": "plan.processes",
        "global_batch": "train.global_batch",
        "stop_at": "train.stop_at",
        "out": "save.dir",
    }
    values: dict[str, object] = {**options}
    for name, key in keys.items():
        if name in values:
            value = values[name]
            texts.append(f"{key}={toml_literal(str(value) if isinstance(value, Path) else value)}")
    return texts


def _texts_of_cluster(options: TrainOptions) -> list[str]:
    """Where a run is: a cluster to plan for, or a number of local ranks; a plan is searched unless one is given."""
    cluster = options.get("cluster", "")
    if not cluster:
        return []
    kind, _, count = cluster.partition(":")
    if kind != "local":
        place = [f"plan.cluster={toml_literal(cluster)}"]
    elif count and not count.isdigit():
        raise ConfigError(
            "E282", f'cluster={cluster!r}: write "local", "local:4", or COUNTxMACHINE, e.g. "8xh100"'
        )
    else:
        place = [f"plan.processes={count}"] if count else []
    return place if options.get("plan") else ["plan.mode=auto", *place]
