"""What starts without torch, and what the package's own names are."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import meshwright

TORCH_FREE = """
import importlib, pkgutil, sys
import meshwright, meshwright.graph, meshwright.layout, meshwright.presets
names = ["meshwright.errors", "meshwright.mesh", "meshwright.training.config", "meshwright.cli.main",
         "meshwright.launching"]
for package in (meshwright.graph, meshwright.layout, meshwright.presets):
    names += [package.__name__ + "." + module.name for module in pkgutil.iter_modules(package.__path__)]
for name in names:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name + " imports torch"
print(len(names))
"""


def test_the_planning_core_and_the_command_line_start_without_torch():
    done = subprocess.run([sys.executable, "-c", TORCH_FREE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 15


# Names that are modules of functions.
MODULES = {"launch": "meshwright.launching.launch"}


@pytest.fixture(scope="module")
def imported() -> list[str]:
    """Every submodule, imported."""
    names = [
        module.name
        for module in pkgutil.walk_packages(meshwright.__path__, "meshwright.")
        if not module.name.endswith("__main__")
    ]
    for name in names:
        importlib.import_module(name)
    return names


@pytest.mark.parametrize("name", [name for name in meshwright.__all__ if name != "__version__"])
def test_no_submodule_takes_the_name_of_a_function(imported, name):
    """`meshwright.train` stays a function although packages are imported beside it."""
    assert len(imported) > 60
    value = getattr(meshwright, name)
    if name in MODULES:
        assert value.__name__ == MODULES[name]
    else:
        assert callable(value)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = meshwright.trian
