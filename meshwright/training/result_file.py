"""`result.json` of a run folder: what rank 0 knows at the end, for whoever looks at the run later.

Owns the file's name and form. Knows nothing of how it is shown.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from meshwright.comm.log import CommLog

RESULT_FILE = "result.json"


def write_result(run_dir: Path, result: Mapping[str, Any], *, log: CommLog, device: torch.device) -> None:
    """Write the contract's result, the communication of this rank since its start, and the environment.

    Args:
        run_dir: the run folder.
        result: as `meshwright train --json` prints it.
        log: counts calls and bytes.
        device: of this rank.
    """
    communication = [
        {"group": axis, "operation": op, "calls": calls, "bytes": log.bytes[op, axis]}
        for (op, axis), calls in sorted(log.calls.items(), key=lambda item: item[0][::-1])
    ]
    document = {**result, "communication": communication, "environment": environment_of(device)}
    (run_dir / RESULT_FILE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def environment_of(device: torch.device) -> dict[str, str]:
    """Versions and the machine of this process, in words."""
    on_gpu = device.type == "cuda"
    return {
        "meshwright": version("meshwright"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": platform.node(),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {os.cpu_count()} cores",
    }
