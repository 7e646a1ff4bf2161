"""Measure this engine in cases measured for other engines.

    python -m bench engine-cases --trace FILE [--peer-json FILE] -- WORKER FLAGS

The engine is composed as in `pagestream worker`, without HTTP and store. Another engine's figures, as JSON lines of the
same names, are printed beside ours. Rows are appended to OUT/NAME.jsonl, so an interrupted run keeps its results.
"""

import argparse
import json
import os
import random
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.engine.router_values import RouterValues
from bench.engine.session import EngineSession
from bench.engine.table import comparison
from bench.provenance import provenance
from bench.workload import read_trace
from shared.garbage_collection import search_rarely

SECTIONS = (
    "decode", "prefill", "trace", "prefix", "turns", "unshared", "parallel", "beam", "pressure", "profile", "sampling",
)  # fmt: skip
Emit = Callable[[dict[str, Any]], None]


def main(argv: list[str]) -> int:
    started_at = time.perf_counter()
    own, worker_flags = _split(argv)
    options = _parser().parse_args(own)
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with (options.out / f"{options.name}.jsonl").open("a", encoding="utf-8") as file:

        def emit(row: dict[str, Any]) -> None:
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
            print("RESULT", json.dumps(row)[:400], flush=True)

        emit({"what": "origin", **provenance(["engine-cases", *argv])})
        failed = _run(options, worker_flags, started_at, emit)
    peer = [json.loads(line) for path in options.peer_json for line in path.read_text(encoding="utf-8").splitlines()]
    print(comparison(rows, peer))
    return 1 if failed else 0


def _run(options: argparse.Namespace, worker_flags: list[str], started_at: float, emit: Emit) -> bool:
    """Run the sections and return whether one failed; a failure does not stop the others."""
    # Imports are part of the start. load_engine() imports torch, at the same time as followers do.
    from engine_worker.__main__ import load_engine  # noqa: PLC0415
    from engine_worker.settings import WorkerSettings  # noqa: PLC0415
    from shared.settings import load_settings  # noqa: PLC0415

    settings = load_settings(WorkerSettings, worker_flags, os.environ, prog="engine-cases").settings
    imported_at = time.perf_counter()
    with ExitStack() as stack:
        counts = _seeded(options, settings, stack)
        loaded = load_engine(settings, _print_progress)
        return _measure(options, loaded, counts, (started_at, imported_at), emit)


def _seeded(options: argparse.Namespace, settings: Any, stack: ExitStack) -> Any:
    """Make the following load use seeded routers; return the counter of experts, or None without --router."""
    if options.router is None:
        return None
    import torch  # noqa: PLC0415 - as above

    from bench.engine.seeded_routers import checked_names, seeded_routers  # noqa: PLC0415
    from engine_worker.model.devices import chosen_device  # noqa: PLC0415

    device = chosen_device(settings.execution.device, has_cuda=torch.cuda.is_available())
    return stack.enter_context(seeded_routers(options.router, checked_names(settings.execution), device))


def _measure(options: argparse.Namespace, loaded: Any, counts: Any, times: tuple[float, float], emit: Emit) -> bool:
    """Run the sections on a loaded engine."""
    from bench.engine.sections import SECTIONS as BY_NAME  # noqa: PLC0415
    from bench.engine.sections import Bench  # noqa: PLC0415

    started_at, imported_at = times
    search_rarely()  # as in a worker
    import torch  # noqa: PLC0415

    from bench.engine.profile import profile  # noqa: PLC0415
    from bench.engine.sampling_cost import sampling_cost  # noqa: PLC0415

    emit(
        {
            "what": "engine_start",
            "import_s": round(imported_at - started_at, 2),
            "engine_s": round(time.perf_counter() - imported_at, 2),
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "kv_bytes": loaded.info.memory_bytes().get("kv"),
            "max_model_len": loaded.info.max_model_len,
            "phases_s": {rank: [[name, round(s, 2)] for name, s in phases] for rank, phases in loaded.start.items()},
        }
    )
    first, last = options.token_ids
    bench = Bench(
        session=EngineSession(loaded.engine),
        lengths=read_trace(options.trace)[: options.num_requests],
        token_ids=range(first, last),
        repeats=options.repeats,
        seed=random.Random(options.seed),
    )
    bench.warm_up()
    if counts is not None:
        from bench.engine.seeded_routers import ROWS, count_experts  # noqa: PLC0415

        draw = random.Random(options.seed)
        prompts = [[draw.randrange(first, last) for _ in range(2)] for _ in range(max(ROWS))]
        for row in count_experts(counts, options.router, bench.session, prompts):
            emit(row)
    failed = _run_sections(options, {**BY_NAME, "profile": profile, "sampling": sampling_cost}, bench, started_at, emit)
    loaded.engine.check_integrity()
    return failed


def _run_sections(
    options: argparse.Namespace, sections: Mapping[str, Callable[[Any], Any]], bench: Any, started_at: float, emit: Emit
) -> bool:
    """Return whether a section failed; the others still run."""
    failed = False
    for name in options.sections:
        begun_at = time.perf_counter()
        if begun_at - started_at > options.budget_seconds:
            emit({"what": "skipped", "section": name})
            continue
        try:
            for row in sections[name](bench):
                emit(row)
        except Exception as error:  # the engine's state is unknown afterwards, but earlier figures are valid
            traceback.print_exc()
            emit({"what": "error", "section": name, "error": repr(error)[:500]})
            failed = True
        emit({"what": "section_time", "section": name, "s": round(time.perf_counter() - begun_at, 1)})
    return failed


def _print_progress(phase: str, progress: float, detail: str) -> None:
    print(f"{phase} {progress:4.0%} {detail}", flush=True)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench engine-cases", description=(__doc__ or "").partition("\n")[0]
    )
    _add_workload(parser)
    _add_output(parser)
    return parser


def _add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", metavar="PATH", type=Path, required=True, help="JSON list of [prompt_tokens, output_tokens]"
    )
    parser.add_argument(
        "--num-requests", metavar="N", type=int, default=None, help="requests of the trace (default: all)"
    )
    parser.add_argument(
        "--sections",
        metavar="NAME,NAME,...",
        type=_sections,
        default=["decode", "prefill", "trace"],
        help=",".join(SECTIONS),
    )
    parser.add_argument("--repeats", metavar="N", type=int, default=2)
    parser.add_argument(
        "--token-ids",
        metavar="N:N",
        type=_range,
        default=(100, 49152),
        help="range of prompt token ids (default: 100:49152)",
    )
    parser.add_argument(
        "--router",
        metavar="SEED[:KIND]",
        type=_router,
        default=None,
        help="replace dummy router weights by seeded ones, uniform or zipf, and count the distinct experts per layer",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=1)
    parser.add_argument(
        "--budget-seconds",
        metavar="SECONDS",
        type=float,
        default=float("inf"),
        help="start no section after this many seconds",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer-json",
        metavar="PATH",
        type=Path,
        action="append",
        default=[],
        help="JSON lines of another engine's figures",
    )
    parser.add_argument("--name", metavar="NAME", default="pagestream")
    parser.add_argument(
        "--out",
        metavar="PATH",
        type=Path,
        default=Path("bench/results"),
        help="folder of NAME.jsonl (default: %(default)s)",
    )


def _sections(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"unknown sections: {', '.join(sorted(unknown))}")
    return names


def _router(text: str) -> RouterValues:
    try:
        return RouterValues.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    return int(first), int(last)
