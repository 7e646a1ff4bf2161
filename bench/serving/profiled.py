"""Run a module as `python -m` does, and count the calls of this repository's functions by phase.

    python -m bench.serving.profiled PHASE_FILE MODULE ARGUMENT...

The first byte of PHASE_FILE is the phase, which another process changes. In LAST_PHASE the process writes its counts
beside it: PHASE_FILE-MODULE.json, a list of [phase, file, function, calls].
"""

import json
import mmap
import runpy
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

LAST_PHASE = 255
POLL_SECONDS = 0.05
ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "engine_worker", "shared", "kernels")


def main(argv: list[str]) -> None:
    phase_file, module, *arguments = argv
    counts = Counter[tuple[int, CodeType]]()
    with open(phase_file, "r+b") as file, mmap.mmap(file.fileno(), 1) as phase:

        def on_event(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                counts[phase[0], frame.f_code] += 1

        def write_in_last_phase() -> None:  # not at the exit, because the worker ends by os._exit
            while phase[0] != LAST_PHASE:
                time.sleep(POLL_SECONDS)
            unfinished = Path(f"{phase_file}-{module}.unfinished")
            unfinished.write_text(json.dumps(_rows(counts)))
            unfinished.rename(f"{phase_file}-{module}.json")

        threading.Thread(target=write_in_last_phase, daemon=True).start()
        sys.argv = [module, *arguments]
        threading.setprofile(on_event)
        sys.setprofile(on_event)
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        finally:
            sys.setprofile(None)


def _rows(counts: Counter[tuple[int, CodeType]]) -> list[tuple[int, str, str, int]]:
    rows = []
    for (phase, code), calls in list(counts.items()):
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES:
            name = f"{code.co_qualname}:{code.co_firstlineno}"
            rows.append((phase, str(path.relative_to(ROOT)), name, calls))
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
