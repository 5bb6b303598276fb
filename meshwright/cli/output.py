"""How verbs print: one JSON object on stdout with `--json`, else text; errors on stderr.

Owns the two streams of a command. Knows nothing of what is printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping

from meshwright.errors import ConfigErrors, MeshwrightError


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON object on one line of stdout."""
    print(json.dumps(value, ensure_ascii=False, default=str), flush=True)


def print_error(error: MeshwrightError, *, json_output: bool) -> None:
    """Print an error as text on stderr, or as `{"error": {code, message, where, errors}}` on stdout."""
    if not json_output:
        print(error, file=sys.stderr)
        return
    listed = error.errors if isinstance(error, ConfigErrors) else [error]
    entries = [{"code": item.code, "message": item.message, "where": item.where} for item in listed]
    message = str(error) if len(entries) > 1 else entries[0]["message"]
    print_json({"error": {**entries[0], "message": message, "errors": entries}})


@contextlib.contextmanager
def stdout_to_stderr(*, active: bool) -> Iterator[None]:
    """Send to stderr what this process and its children write to stdout, so that stdout holds JSON only."""
    if not active:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        # Python's own stream may not write to descriptor 1, e.g. inside a test runner.
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
