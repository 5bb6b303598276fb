"""`meshwright.plan(...)`: the fastest layout that fits, from Python; the command line asks by the same function.

Owns how a model that is named, a file or a Python object becomes a question for the planner. Must not know how plans
are found or shown.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, Unpack

from meshwright.launching.plan_result import PlanResult
from meshwright.launching.shapes import shape_of_object, shape_of_run
from meshwright.launching.this_host import located
from meshwright.planner.asking import Sections, ask, sections_of
from meshwright.planner.plans import DEFAULT_COUNT, make_plans
from meshwright.planner.request import Request
from meshwright.presets.models import ModelPreset
from meshwright.simulation.reading import plan_values
from meshwright.training.config import RunConfig, default_cache_dir, load_config


class PlanOptions(TypedDict, total=False):
    """What `plan` may be told beside the model.

    Keys:
        cluster: COUNTxMACHINE, e.g. "64xh100", or a file cluster.toml; "2xcpu" is processes of this host.
        global_batch: sequences of a step: 512, or "512 sequences"; default: the run file's, else one a device.
        seq_len: tokens of a sequence; default: the run file's, else the longest of the model.
        plan: what is fixed, as keys of the run file's `plan` table: "tp=8,zero=1".
        headroom: memory that stays free: "10%", or 0.1.
        count: plans wanted at most.
    """

    cluster: str | Path
    global_batch: int | str
    seq_len: int
    plan: str
    headroom: str | float
    count: int


Model = str | Path | RunConfig | tuple[Any, ...] | Callable[..., Any]


def plan(model: Model, **options: Unpack[PlanOptions]) -> PlanResult:
    """Search for the fastest layout that fits: `meshwright.plan("llama-3.1-70b", cluster="64xh100")`.

    Args:
        model: a preset; a config.json of Hugging Face or its folder; a run file or a configuration;
            `py:module:function` or `hf:PLACE`; a module or a function that makes one; what `meshwright.hf` returned.
        **options: see `PlanOptions`.

    Returns:
        The plans, best first: `.best`, `.plans`, `.rejected(...)`, `.compare(1, 2)`, `.save(...)`.

    Raises:
        ConfigError: E104 for an unknown model or machine, E282 without a cluster, E283, E285, E287; E269 for a Python
            model whose shape is not known.
        PlanError: E286 for fixed degrees that do not divide the cluster.
        DoesNotFitError: E301 where no layout fits.
    """
    started = time.perf_counter()
    # Processes of this host are measured now, if torch is here.
    measures = importlib.util.find_spec("torch") is not None
    request = located(question_of(model, **options), default_cache_dir(), measures=measures)
    found = make_plans(request, count=options.get("count", DEFAULT_COUNT))
    return PlanResult(found, name_of(model), time.perf_counter() - started)


def question_of(model: Model, **options: Unpack[PlanOptions]) -> Request:
    """The question, with nothing known of this host; raises as `plan` does."""
    sections, shape = read_model(model)
    keys = {"cluster": options.get("cluster"), "memory_headroom": options.get("headroom")}
    given = {key: str(value) for key, value in keys.items() if value not in (None, "")}
    batch = options.get("global_batch")
    return ask(
        sections,
        {**given, **plan_values(options.get("plan", ""))},
        seq=options.get("seq_len"),
        batch=None if batch is None else str(batch),
        model=shape,
    )


def name_of(model: Model) -> str:
    """What plans are of, in their file."""
    if isinstance(model, str | Path):
        return str(model)
    if isinstance(model, RunConfig):
        return model.model.source
    if isinstance(model, tuple):  # of meshwright.hf
        return f"hf:{model[0].place}"
    named = getattr(model, "__qualname__", type(model).__qualname__)
    return f"py:{getattr(model, '__module__', '__main__')}:{named}"


def read_model(model: Model) -> tuple[Sections, ModelPreset | None]:
    """A run's sections, and the shape of a model that only Python knows."""
    if isinstance(model, RunConfig):
        values = model.model_dump(mode="json", exclude_unset=True)
        resolved = load_config(None, built_in=values, built_in_name="RunConfig")
        return sections_of(resolved), shape_of_run(resolved.config)
    if not isinstance(model, str | Path):
        return {}, shape_of_object(model)
    text = str(model)
    if text.endswith(".toml"):
        resolved = load_config(Path(text))
        return sections_of(resolved), shape_of_run(resolved.config)
    if text.startswith(("py:", "hf:")):
        resolved = load_config(None, [f"model.source={text}"])
        return {"model": {"source": text}}, shape_of_run(resolved.config)
    is_file = text.endswith(".json") or Path(text).is_dir()
    name = f"hf:{text}" if is_file else f"preset:{text.removeprefix('preset:')}"
    return {"model": {"source": name}}, None
