"""A launcher in a process of its own, to be interrupted or killed; like the real one it does not import torch."""

import os
import sys
import time
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.launching import WorkerContext, run_local


def sleep_with_child(_world: object, context: WorkerContext) -> None:
    """Endless work, with a child process as a data loader has."""
    if os.fork() == 0:
        time.sleep(3600)
    (context.run_dir / f"ready{context.rank}").touch()
    time.sleep(3600)


def parent_main(run_dir: str, processes: str) -> None:
    """Exit codes as the command line has them."""
    try:
        run_local(sleep_with_child, processes=int(processes), run_dir=Path(run_dir))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    parent_main(*sys.argv[1:])
