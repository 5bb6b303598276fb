"""Packages import one way only, and only `comm/` talks to the network."""

from __future__ import annotations

import ast

import pytest

from tests.house.source import ROOT, Import, imports, modules, parse, unit_of

# A package imports only from rows above its own; siblings on one row never import each other.
ROWS = (
    ("errors",),
    ("mesh",),
    ("presets",),
    ("layout", "exchange", "schedule"),
    ("graph",),
    ("simulation",),
    ("partitioning",),
    ("planner",),
    ("nested",),
    ("comm",),
    ("sharding", "tensor", "context", "checkpoint", "recompute"),
    ("adapt", "capture"),
    ("pipeline",),
    ("models", "data"),
    ("training",),
    ("verification", "reporting"),
    ("launching",),
    ("cli", "testing"),
    ("lessons",),
)
IMPORTS_NOTHING_OF_OURS = {"errors", "models"}
# Imports inside functions: the command line, launchers and test pools start before torch is loaded.
MAY_IMPORT_LATE = {"cli", "launching", "testing", "lessons"}
# Dependencies that only some runs need.
OPTIONAL = {
    ("meshwright/adapt/context_hf.py", "transformers"),
    ("meshwright/data/digits.py", "sklearn.datasets"),
    ("meshwright/data/hub.py", "huggingface_hub"),
    ("meshwright/data/hub_datasets.py", "datasets"),
    ("meshwright/data/hub_datasets.py", "datasets.packaged_modules.cache.cache"),
    ("meshwright/data/hub_datasets.py", "huggingface_hub"),
    ("meshwright/data/hub_datasets.py", "huggingface_hub.errors"),
    ("meshwright/data/parquet.py", "pyarrow"),
    ("meshwright/data/parquet.py", "pyarrow.parquet"),
    ("meshwright/data/tables.py", "pyarrow.types"),
    ("meshwright/data/tokenizer.py", "tokenizers"),
    ("meshwright/graph/onnx_file.py", "onnx"),
    ("meshwright/training/flops.py", "meshwright.capture.capture"),
    ("meshwright/training/hf_source.py", "transformers"),
    ("meshwright/training/hf_source.py", "transformers.conversion_mapping"),
    ("meshwright/training/hf_source.py", "transformers.core_model_loading"),
    ("meshwright/training/metrics.py", "torch.utils.tensorboard"),
}
# Besides comm/: the pool of ranks makes the process groups of tests; torch's own checkpoints are files here.
TORCH_DISTRIBUTED = {"meshwright/testing/ranks.py", "meshwright/checkpoint/dcp.py"}
# What a process is told by its environment is read in two places; launchers and the pool set it for children.
READS_ENVIRONMENT = {
    "meshwright/training/config.py",
    "meshwright/comm/mesh.py",
    "meshwright/testing/ranks.py",
}


def row_of(unit: str) -> int:
    return next(row for row, units in enumerate(ROWS) if unit in units)


def is_legal(found: Import) -> bool:
    source, target = unit_of(found.file), unit_of(found.target)
    if source in ("", target):
        return True  # the root only names its exports; a package is free inside itself
    if target == "":
        return source in ("cli", "lessons")  # the version
    if source == "lessons":
        return True
    return source not in IMPORTS_NOTHING_OF_OURS and row_of(target) < row_of(source)


def of_ours() -> list[Import]:
    return [found for found in imports() if found.target.split(".")[0] == "meshwright"]


def test_every_package_has_a_row_and_every_row_a_package():
    units = {unit_of(name) for name in modules()} - {""}
    assert units == {unit for row in ROWS for unit in row}


def test_imports_go_up_only():
    assert [str(found) for found in of_ours() if not is_legal(found)] == []


@pytest.mark.parametrize(
    ("file", "target", "legal"),
    [
        ("meshwright/comm/ops.py", "meshwright.errors", True),
        ("meshwright/layout/plan.py", "meshwright.layout.policy", True),
        ("meshwright/lessons/lesson_00.py", "meshwright.testing.ranks", True),
        ("meshwright/testing/ranks.py", "meshwright.launching", True),
        ("meshwright/cli/main.py", "meshwright.testing.ranks", False),
        ("meshwright/testing/ranks.py", "meshwright.cli.main", False),
        ("meshwright/verification/candidate.py", "meshwright.launching.local", False),
        ("meshwright/comm/ops.py", "meshwright.sharding.engine", False),
        ("meshwright/data/order.py", "meshwright.models.gpt", False),
        ("meshwright/checkpoint/writer.py", "meshwright.sharding.engine", False),
        ("meshwright/models/gpt.py", "meshwright.errors", False),
        ("meshwright/comm/ops.py", "meshwright", False),
    ],
)
def test_the_rule_tells_right_from_wrong(file, target, legal):
    assert is_legal(Import(file, 1, target, False, False)) == legal


def test_imports_stand_at_the_top_of_their_file():
    hidden = [
        str(found)
        for found in imports()
        if found.hidden
        and unit_of(found.file) not in MAY_IMPORT_LATE | {""}
        and (found.file, found.target) not in OPTIONAL
    ]
    assert hidden == []


def test_optional_dependencies_are_still_imported_late():
    """An entry of the list of exceptions that nothing needs any more must go."""
    assert {(found.file, found.target) for found in imports() if found.hidden} >= OPTIONAL


def test_only_comm_talks_to_the_network():
    importers = {found.file for found in imports() if found.target.startswith("torch.distributed")}
    named = {
        str(path.relative_to(ROOT))
        for path in modules().values()
        if any(
            isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed")
            for node in ast.walk(parse(path))
        )
    }
    outside = {file for file in importers | named if unit_of(file) != "comm"}
    assert outside == TORCH_DISTRIBUTED


def test_the_environment_is_read_in_known_places():
    readers = {
        str(path.relative_to(ROOT))
        for path in modules().values()
        if any(
            isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
            for node in ast.walk(parse(path))
        )
    }
    assert {file for file in readers if unit_of(file) != "launching"} == READS_ENVIRONMENT


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other in a circle, hidden imports and those for types included."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for target in sorted(edges.get(module, ())):
                visit(target, [*path, module])
            done.add(module)

    for module in sorted(edges):
        visit(module, [])
    return found


def test_modules_of_verification_do_not_import_each_other_in_circles():
    edges: dict[str, set[str]] = {}
    for found in of_ours():
        source = found.file.removesuffix(".py").replace("/", ".")
        if unit_of(found.file) == unit_of(found.target) == "verification":
            edges.setdefault(source, set()).add(found.target)
    assert len(edges) > 5
    assert circles(edges) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c", "a"]]
