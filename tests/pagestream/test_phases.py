"""The phases of a start, on a terminal and in a log."""

import io

from pagestream.phases import PhaseConsole


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_one_line_per_phase() -> None:
    stream, clock = io.StringIO(), Clock()
    console = PhaseConsole(stream, clock)
    console.update("worker-0", "load", 0.1, "1 of 2")
    clock.now = 1.5
    console.update("worker-0", "load", 1.0, "269 MB")
    console.update("worker-0", "allocate_kv", 0.0)
    clock.now = 2.0
    console.end("worker-0")
    console.end("worker-0")
    assert stream.getvalue() == (
        "  worker-0  load         100%    1.5 s  269 MB\n"
        "  worker-0  allocate KV  100%    0.5 s\n"
    )  # fmt: skip


def test_a_log_is_never_silent_for_long() -> None:
    stream, clock = io.StringIO(), Clock()
    console = PhaseConsole(stream, clock)
    for second in range(0, 26):
        clock.now = float(second)
        console.update("model", "download", second / 100, "93 MB")
    assert stream.getvalue().splitlines() == [
        "  model     download      10%   10.0 s  93 MB",
        "  model     download      20%   20.0 s  93 MB",
    ]


def test_a_terminal_line_is_rewritten_in_place() -> None:
    stream, clock = Terminal(), Clock()
    console = PhaseConsole(stream, clock)
    console.update("model", "convert", 0.25)
    console.update("model", "convert", 0.5)
    console.print("worker-0 | hello")
    console.end("model")
    assert stream.getvalue() == (
        "  model     convert       25%    0.0 s"
        "\r\x1b[K  model     convert       50%    0.0 s"
        "\r\x1b[Kworker-0 | hello\n"
        "  model     convert      100%    0.0 s\n"
    )


def test_an_abandoned_phase_is_not_called_complete() -> None:
    stream = io.StringIO()
    console = PhaseConsole(stream, Clock())
    console.update("worker-0", "load", 0.4)
    console.abandon("worker-0")
    console.end("worker-0")
    assert stream.getvalue() == ""
