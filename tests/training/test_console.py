"""Lines off a terminal, a status line on one."""

import contextlib
import io
import os

from meshwright.training.console import Console


def test_a_file_gets_permanent_lines_only() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.line("step=1 loss=[2.5]")
    console.status("step=2")
    console.close()
    assert not console.is_terminal
    assert stream.getvalue() == "step=1 loss=[2.5]\n"


def test_no_stream_gets_nothing(capfd) -> None:
    console = Console(None)
    console.line("x")
    console.status("y")
    console.close()
    assert capfd.readouterr() == ("", "")


def _read_all(leader: int) -> str:
    """Everything that was written to the terminal, whose other side is closed."""
    parts = []
    with contextlib.suppress(OSError):  # how Linux says that nothing is left
        while part := os.read(leader, 4096):
            parts.append(part)
    os.close(leader)
    return b"".join(parts).decode()


def test_a_terminal_gets_a_line_that_is_replaced() -> None:
    leader, follower = os.openpty()
    with open(follower, "w") as stream:
        console = Console(stream)
        assert console.is_terminal
        console.status("step 1 of 9")
        console.line("eval loss [2.0]")
        console.status("step 2 of 9")
        console.close()
    shown = _read_all(leader)
    assert shown.index("step 1 of 9") < shown.index("eval loss [2.0]") < shown.index("step 2 of 9")
    assert "\x1b[2K" in shown  # the line is erased
