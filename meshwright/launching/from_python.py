"""`meshwright.train(...)`: a run file, a configuration, or a model, its loss and its data as Python objects.

Owns how objects become a configuration, and that they travel to workers by cloudpickle. A module that is given with
its weights is copied to every rank; what is learned is in the run's checkpoints, not in the caller's module.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, Unpack

from meshwright.errors import ConfigError
from meshwright.launching.jobs import launch_config
from meshwright.training.config import RunConfig, load_config
from meshwright.training.units import split_at_commas, toml_literal
from meshwright.verification.job import Functions


class TrainOptions(TypedDict, total=False):
    """What `train` may be told beside texts `a.b=c`.

    Keys:
        loss: (model, batch) -> (sum, count), or a bare scalar that is a mean over samples; of a model.
        data: map-style dataset whose items torch's default collate stacks; of a model.
        plan: `auto`, or keys of the run file's `plan` table: `pp=2,zero=1`.
        processes: local ranks.
        global_batch: samples of a step.
        stop_at: as `train.stop_at`: "2000 steps", "60 s".
        out: run folder.
    """

    loss: Callable[[Any, Any], Any]
    data: Any
    plan: str
    processes: int
    global_batch: int
    stop_at: str
    out: str | Path


def train(
    source: str | Path | RunConfig | Callable[[], Any],
    *overrides: str,
    resume: str | None = None,
    **options: Unpack[TrainOptions],
) -> dict[str, Any]:
    """Train from Python: a run file, or `meshwright.train(Net, loss=loss_fn, data=dataset, plan="auto")`.

    Args:
        source: a run file, a configuration, a module, or a function that makes one, the same at each call.
        *overrides: texts `a.b=c`.
        resume: `auto`, or a run folder or checkpoint to go on from.
        **options: see `TrainOptions`.

    Returns:
        The contract's result, as `meshwright train --json` prints it.

    Raises:
        MeshwrightError: as the command line prints it; E111 for a model without loss or data.
    """
    texts = [*_texts(options), *overrides]
    if isinstance(source, RunConfig):
        values = source.model_dump(mode="json", exclude_unset=True)
        resolved = load_config(None, texts, built_in=values, built_in_name="RunConfig")
        return launch_config(resolved, json_output=True, resume=resume)
    if isinstance(source, str | Path):
        return launch_config(load_config(Path(source), texts), json_output=True, resume=resume)
    functions = _functions(source, options)
    named = getattr(source, "__qualname__", type(source).__qualname__)
    place = f"py:{getattr(source, '__module__', '__main__')}:{named}"
    resolved = load_config(
        None, texts, built_in={"model": {"source": place}}, built_in_name="meshwright.train"
    )
    return launch_config(resolved, json_output=True, resume=resume, functions=functions)


def _functions(source: Callable[[], Any], options: TrainOptions) -> Functions:
    missing = [name for name in ("loss", "data") if name not in options]
    if missing or not callable(source):
        raise ConfigError(
            "E111",
            f"meshwright.train({type(source).__name__}) needs loss= and data= as well: "
            f'meshwright.train(lambda: Net(64), loss=loss_fn, data=dataset, plan="auto")',
        )
    from torch import nn  # whoever has a model has torch; a launcher must not load it

    if isinstance(source, nn.Module):
        return Functions(lambda: source, options["loss"], options["data"])
    return Functions(source, options["loss"], options["data"])


def _texts(options: TrainOptions) -> list[str]:
    plan = options.get("plan", "")
    texts = ["plan.mode=auto"] if plan == "auto" else [f"plan.{part}" for part in split_at_commas(plan)]
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
