"""The package's source as data: every import of every file, with where it stands."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "meshwright"


@dataclass(frozen=True)
class Import:
    """One imported module.

    Attributes:
        file: importing file, relative to the repository.
        line: its line.
        target: dotted module as far as it is a module of ours, else as written.
        hidden: it runs later than the module's import (inside a function), or perhaps never.
        typing_only: under `if TYPE_CHECKING`.
    """

    file: str
    line: int
    target: str
    hidden: bool
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


def modules() -> dict[str, Path]:
    """Dotted name to file of every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports() -> list[Import]:
    known = set(modules())
    return [found for path in modules().values() for found in _imports_of(path, known)]


def _imports_of(path: Path, known: set[str]) -> Iterator[Import]:
    file = str(path.relative_to(ROOT))

    def visit(node: ast.AST, hidden: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            for target in _targets(child, known):
                yield Import(file, child.lineno, target, hidden, typing_only)
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typed = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            yield from visit(child, hidden or function, typing_only or typed)

    return visit(parse(path), False, False)


def _targets(node: ast.AST, known: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: relative imports hide which package is meant"
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            yield full if full in known or full == "torch.distributed" else str(node.module)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        argument = node.args[0]
        if isinstance(argument, ast.Constant):
            yield str(argument.value)


def unit_of(file_or_module: str) -> str:
    """The package or top-level module that a file or module of ours belongs to: `comm`, `mesh`; root: empty."""
    parts = file_or_module.removesuffix(".py").replace("/", ".").split(".")
    return parts[1] if len(parts) > 1 and parts[1] not in ("__init__", "__main__") else ""
