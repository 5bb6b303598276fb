"""`meshwright ckpt`: list and describe checkpoints, and turn them into and from other formats.

Owns the arguments and the printing. `ls` and `info` run without torch.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from meshwright.checkpoint.folder import check_files, find_checkpoints, read_manifest
from meshwright.checkpoint.manifest import Manifest
from meshwright.cli.output import print_json
from meshwright.cli.train import require_torch
from meshwright.errors import CheckpointError

app = typer.Typer(
    help="Checkpoints: list, look into, export, import.", no_args_is_help=True, rich_markup_mode=None
)

_Place = Annotated[Path, typer.Argument(help="A run folder, or one checkpoint of it.")]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command(name="ls")
def list_all(
    place: _Place = Path("runs"),
    check: Annotated[bool, typer.Option("--check", help="Read every file and compare its checksum.")] = False,
    json_output: _Json = False,
) -> None:
    """All checkpoints of a run folder, or of the run folders in a folder, the newest of each first."""
    runs = [place] if find_checkpoints(place) or not place.is_dir() else sorted(place.iterdir())
    rows = [_row(path, check=check) for run in runs for path in find_checkpoints(run)]
    if not rows:
        raise CheckpointError(
            "E503", f"no checkpoint in {str(place)!r}; runs write them where save.every is set"
        )
    if json_output:
        print_json({"checkpoints": rows})
        return
    width = max(len(row["path"]) for row in rows)
    for row in rows:
        if row["error"]:
            print(f"{row['path']:{width}}  {row['error']}")
        else:
            written = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["written"]))
            whole = "checked" if check else "complete"
            print(
                f"{row['path']:{width}}  step {row['step']:,}  {_size(row['bytes'])}  {row['world_size']} ranks  "
                f"{written}  {whole}"
            )


@app.command()
def info(place: _Place, json_output: _Json = False) -> None:
    """What a checkpoint holds; of a run folder, the newest one."""
    path, manifest = _newest(place)
    facts = _facts(path, manifest)
    if json_output:
        print_json(facts)
        return
    kinds = " · ".join(
        f"{value['tensors']} {kind} {_size(value['bytes'])}" for kind, value in facts["kinds"].items()
    )
    rows = {
        "path": str(path),
        "step": f"{facts['step']:,}   tokens {facts['tokens']:,}   next sample {facts['samples']:,}",
        "model": f"{facts['source'] or 'unknown'}   {facts['parameters']:,} parameters   {facts['fingerprint']}",
        "saved on": f"{facts['world_size']} ranks   {facts['policy']}   optimizer {facts['optimizer'] or 'none'}",
        "holds": kinds,
        "files": f"{len(manifest.files)}   {_size(manifest.nbytes)}",
    }
    for name, value in rows.items():
        print(f"{name:9} {value}")


@app.command(name="export")
def export_to(
    place: _Place,
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    to: Annotated[
        Literal["safetensors", "dcp"],
        typer.Option(
            "--to", help="safetensors (weights, layout of the HF hub), or torch's distributed checkpoint."
        ),
    ] = "safetensors",
    dtype: Annotated[
        Literal["fp64", "fp32", "bf16", "fp16"] | None, typer.Option("--dtype", help="Of exported weights.")
    ] = None,
    json_output: _Json = False,
) -> None:
    """Write a checkpoint's weights for other tools."""
    require_torch()
    path, manifest = _newest(place)
    if error := check_files(path, manifest):
        raise error
    import torch

    from meshwright.checkpoint.dcp import export_dcp
    from meshwright.checkpoint.exporting import export_safetensors
    from meshwright.checkpoint.reader import CheckpointReader

    names = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if to == "dcp" and dtype is not None:
        raise CheckpointError("E505", f"--dtype {dtype}: a dcp export keeps types, for its optimizer state")
    with CheckpointReader(path, manifest) as reader:
        if to == "dcp":
            done = export_dcp(reader, out)
        else:
            done = export_safetensors(reader, out, dtype=names[dtype] if dtype else None)
    if json_output:
        print_json(
            {
                "source": str(path),
                "out": str(out),
                "files": done.files,
                "tensors": done.num_tensors,
                "bytes": done.nbytes,
            }
        )
    else:
        print(f"{path} → {out}   {done.num_tensors} tensors   {_size(done.nbytes)}   {len(done.files)} files")


@app.command(name="import")
def import_from(
    source: Annotated[
        Path, typer.Argument(help="Safetensors (file or folder), or a torch distributed checkpoint.")
    ],
    out: Annotated[Path, typer.Argument(help="The checkpoint, a new folder.")],
    optimizer: Annotated[
        str, typer.Option("--optimizer", help="Take optimizer state along (dcp), of this update rule.")
    ] = "",
    json_output: _Json = False,
) -> None:
    """Make a checkpoint of other tools' weights: `meshwright train run.toml --resume OUT` starts from it."""
    require_torch()
    from meshwright.checkpoint.dcp import METADATA_NAME, import_dcp
    from meshwright.checkpoint.importing import import_safetensors

    if (source / METADATA_NAME).is_file():
        manifest = import_dcp(source, out, optimizer=optimizer)
    elif optimizer:
        raise CheckpointError("E505", f"--optimizer {optimizer}: safetensors files hold no optimizer state")
    else:
        manifest = import_safetensors(source, out)
    if json_output:
        print_json(_facts(out, manifest))
    else:
        print(
            f"{source} → {out}   {len(manifest.tensors)} tensors   {_size(manifest.nbytes)}   step {manifest.run.step}"
        )


def _newest(place: Path) -> tuple[Path, Manifest]:
    found = find_checkpoints(place)
    if not found:
        raise CheckpointError(
            "E503", f"no checkpoint in {str(place)!r}; give a run folder, or one checkpoint of it"
        )
    return found[0], read_manifest(found[0])


def _row(path: Path, *, check: bool) -> dict[str, Any]:
    """What `ls` says of one checkpoint; damaged ones are listed, not raised."""
    error: CheckpointError | None = None
    facts: dict[str, Any] = {}
    try:
        manifest = read_manifest(path)
        facts = {
            "step": manifest.run.step,
            "bytes": manifest.nbytes,
            "world_size": manifest.world_size,
            "written": manifest.written,
        }
        error = check_files(path, manifest) if check else None
    except CheckpointError as caught:
        error = caught
    return {"path": str(path), **facts, "ok": error is None, "error": str(error) if error else None}


def _facts(path: Path, manifest: Manifest) -> dict[str, Any]:
    run = manifest.run
    kinds: dict[str, dict[str, int]] = {}
    for tensor in manifest.tensors:
        entry = kinds.setdefault(tensor.kind, {"tensors": 0, "elements": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["elements"] += tensor.numel
        entry["bytes"] += tensor.nbytes
    return {
        "path": str(path),
        "step": run.step,
        "tokens": run.tokens,
        "samples": run.samples,
        "seed": run.seed,
        "source": run.config.get("model.source"),
        "optimizer": run.optimizer,
        "policy": run.plan.get("policy", {}).get("name", "one process"),
        "plan": dict(run.plan),
        "world_size": manifest.world_size,
        "fingerprint": manifest.fingerprint,
        "parameters": kinds.get("parameter", {}).get("elements", 0),
        "kinds": kinds,
        "files": len(manifest.files),
        "bytes": manifest.nbytes,
        "written": manifest.written,
    }


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"
