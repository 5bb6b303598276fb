"""`meshwright draw --graph`: a model as a graph of tasks.

Owns where a graph comes from: a file, or a model that is captured. Imported when it is asked for: it needs numpy, and
torch for models.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.cli.train import require_torch
from meshwright.errors import ConfigError
from meshwright.graph.draw import as_svg, as_text
from meshwright.graph.json_file import from_json, to_json
from meshwright.graph.onnx_file import read_onnx
from meshwright.graph.task_graph import TaskGraph


def draw_graph(source: str, sizes: tuple[int, int], *, json: bool) -> tuple[str, str, dict[str, object]]:
    """Text, SVG or JSON, and figures of a model."""
    if min(sizes) < 1:
        raise ConfigError("E109", f"--batch {sizes[0]} --sequence {sizes[1]}: each is at least 1")
    made = read_graph(source, sizes)
    batch = sizes[0] if "batch" in made.free else made.batch
    sequence = sizes[1] if "sequence" in made.free else made.sequence
    sizes = (batch, sequence)
    facts: dict[str, object] = {
        "graph": made.name,
        "source": made.source,
        "tasks": len(made.tasks),
        "parameters": made.num_parameters(),
        "batch": sizes[0],
        "sequence": sizes[1],
        "free": list(made.free),
        "flops": made.flops()(*sizes),
        "backward_flops": made.backward_flops()(*sizes),
        "saved_bytes": made.saved_bytes()(*sizes),
        "flops_formula": str(made.flops()),
        "saved_bytes_formula": str(made.saved_bytes()),
        "ties": [list(group) for group in made.ties()],
        "notes": list(made.notes),
    }
    return as_text(made, *sizes), to_json(made) if json else as_svg(made, *sizes), facts


def read_graph(source: str, sizes: tuple[int, int]) -> TaskGraph:
    """From a file, or captured.

    Raises:
        ConfigError: E100, E130 to E138 for what cannot be read or captured.
    """
    path = Path(source)
    if path.suffix in (".json", ".onnx") and not path.is_file():
        raise ConfigError("E100", f"--graph {source}: there is no such file")
    if path.suffix == ".json":
        return from_json(path.read_text(encoding="utf-8"), where=source)
    if path.suffix == ".onnx":
        return read_onnx(path, batch=sizes[0], sequence=sizes[1])
    require_torch()
    from meshwright.training.graphs import graph_of

    return graph_of(source, *sizes)
