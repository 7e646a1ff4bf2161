"""One incarnation of a child: its output, its exit, and its exit with the parent. Real processes."""

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from pagestream.child_process import KEPT_LINES, MAX_LINE_BYTES, ChildCommand, ChildProcess
from tests.patience import PATIENCE_SECONDS

IGNORES_SIGTERM = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def python(code: str, **options: object) -> ChildCommand:
    return ChildCommand(name="child", argv=[sys.executable, "-c", code], **options)  # type: ignore[arg-type]


async def start_and_await_line(command: ChildCommand) -> ChildProcess:
    said = asyncio.Event()
    child = await ChildProcess.start(command, lambda _name, _line: said.set())
    await said.wait()
    return child


async def test_both_output_streams_reach_the_sink_and_the_tail() -> None:
    seen: list[tuple[str, str]] = []
    code = "import sys\nfor i in range(30): print(i, flush=True)\nsys.stderr.write('end')"
    child = await ChildProcess.start(python(code), lambda name, line: seen.append((name, line)))
    assert await child.wait() == 0
    assert seen == [("child", str(i)) for i in range(30)] + [("child", "end")]
    assert list(child.last_lines) == [str(i) for i in range(31 - KEPT_LINES, 30)] + ["end"]


async def test_endless_line_does_not_stop_the_reader() -> None:
    child = await ChildProcess.start(python(f"print('x' * {2 * MAX_LINE_BYTES}); print('after')"))
    assert await child.wait() == 0
    assert child.last_lines[-1] == "after"


async def test_exit_status_contains_the_signal() -> None:
    child = await start_and_await_line(python("print(1, flush=True); import time; time.sleep(60)"))
    child.send_signal(signal.SIGTERM)  # not SIGINT, which background jobs of a shell and their children ignore
    assert await child.wait() == -signal.SIGTERM
    child = await start_and_await_line(python("print(1, flush=True); import time; time.sleep(60)"))
    child.kill()
    assert await child.wait() == -signal.SIGKILL


async def test_stop_sends_sigterm_first() -> None:
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print(1, flush=True); time.sleep(60)"
    child = await start_and_await_line(python(code))
    assert await child.stop(grace_seconds=20.0) == 7


async def test_stop_kills_an_unresponsive_child_and_its_children() -> None:
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {IGNORES_SIGTERM!r}]); {IGNORES_SIGTERM}"
    child = await start_and_await_line(python(code))
    family = [psutil.Process(child.process.pid), *psutil.Process(child.process.pid).children()]
    assert await child.stop(grace_seconds=0.1) == -signal.SIGKILL
    _gone, alive = psutil.wait_procs(family, timeout=PATIENCE_SECONDS)
    assert alive == []


async def test_missing_program_raises_oserror() -> None:
    with pytest.raises(FileNotFoundError):
        await ChildProcess.start(ChildCommand(name="none", argv=["/nowhere/none"]))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_child_ends_with_a_killed_supervisor() -> None:
    supervisor = f"""
import asyncio, sys
from pagestream.child_process import ChildCommand, ChildProcess
async def main():
    child = await ChildProcess.start(ChildCommand(name="child", argv=[sys.executable, "-c", {IGNORES_SIGTERM!r}]))
    while not child.last_lines: await asyncio.sleep(0.01)
    print(child.process.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", supervisor], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        os.kill(process.pid, signal.SIGKILL)
        _gone, alive = psutil.wait_procs([child], timeout=PATIENCE_SECONDS)
    assert alive == []
