"""What a person sees of a run: permanent lines, and one line that is replaced on a terminal.

Owns the difference between a terminal and a file. Knows nothing of torch or of what the lines say.
"""

from __future__ import annotations

from typing import TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text


class Console:
    """Lines for people.

    Args:
        stream: where to write; None writes nothing, as on all ranks but the first.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.is_terminal = stream is not None and stream.isatty()
        self._stream = stream
        self._live: Live | None = None
        if stream is not None and self.is_terminal:
            rich = RichConsole(file=stream, highlight=False, markup=False, soft_wrap=True)
            self._live = Live(Text(""), console=rich, auto_refresh=False, transient=True)

    def line(self, text: str) -> None:
        """Write a line that stays."""
        if self._live is not None:
            self._live.console.print(Text(text), soft_wrap=True)
        elif self._stream is not None:
            print(text, file=self._stream, flush=True)

    def status(self, text: str) -> None:
        """Replace the status line of a terminal; nothing elsewhere, so that log files hold no progress bars."""
        if self._live is not None:
            self._live.start()  # does nothing when it has begun
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        """Remove the status line."""
        if self._live is not None:
            self._live.stop()
