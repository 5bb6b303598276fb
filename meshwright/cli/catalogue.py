"""Every code an error or a warning can carry: what it means and what to do.

Owns their order: the tables of `codes_*.py`, one after the other. A test compares them with the
codes in the source, both ways.
"""

from __future__ import annotations

from meshwright.cli.codes_configuration import CONFIGURATION
from meshwright.cli.codes_layouts import LAYOUTS
from meshwright.cli.codes_plans import PLANS
from meshwright.cli.codes_runs import RUNS
from meshwright.cli.codes_warnings import WARNINGS

CATALOGUE = (*CONFIGURATION, *LAYOUTS, *PLANS, *RUNS, *WARNINGS)
