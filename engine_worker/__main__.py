"""`python -m engine_worker`: builds the worker from its settings and runs it.

torch takes seconds to import; the engine thread imports it after the health routes and the first heartbeat started.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from engine_worker.engine import Engine
from engine_worker.execution.group_health import ALONE
from engine_worker.execution.load.start_times import StartTimes, log_lines
from engine_worker.execution.ranks.follower_processes import Followers
from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.kv.kv_durations import KVDurations
from engine_worker.kv.kv_events import KVEventLog
from engine_worker.kv.preemption import HostTierConfig, OffloadedPrefixes, PreemptionMode, TransferCosts
from engine_worker.metrics import EngineInfo
from engine_worker.model.preflight import check_draft_head, check_files
from engine_worker.scheduling.scheduler import Scheduler, SchedulerConfig
from engine_worker.scheduling.settings import SchedulingSettings
from engine_worker.scheduling.speculation.draft_gain import DraftGain
from engine_worker.scheduling.speculation.drafting import Drafting, DraftLimits
from engine_worker.scheduling.speculation.proposers import PROPOSERS
from engine_worker.service import CannotStart, LoadedEngine, LoadEngine, Report, WorkerService
from engine_worker.settings import WorkerSettings, draft_settings
from shared.garbage_collection import no_searches, search_rarely
from shared.logs import configure_logging
from shared.model_identity import files_identity
from shared.processes import exit_with_parent
from shared.setting_names import discard_unread_variables
from shared.settings import settings_or_exit
from shared.store_errors import StoreRefused

if TYPE_CHECKING:
    from engine_worker.execution.step.model_runner import ModelRunner

logger = logging.getLogger("worker")

# A sequence whose KV is fetched runs one step later: a few ms, independent of the size.
FETCH_SECONDS = 0.002

PROGRAM = "pagestream worker"
EXIT_OK, EXIT_FAILED, EXIT_CANNOT_START = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker. Return the exit status."""
    parent_pid = os.getppid()
    discard_unread_variables(os.environ, PROGRAM)
    arguments = sys.argv[1:] if argv is None else argv
    settings = settings_or_exit(WorkerSettings, arguments, os.environ, prog=PROGRAM).settings
    if settings.check:
        return check(settings)
    configure_logging(settings.log_format)
    if settings.exit_with_parent:
        # SIGKILL instead of SIGTERM: without a supervisor no drain is needed, because the journal has every token.
        exit_with_parent(parent_pid, signal.SIGKILL)
    return run(settings, partial(load_engine, settings))


def check(settings: WorkerSettings) -> int:
    """Check the files of a model that is on this machine. Return the exit status."""
    if (settings.execution.model / "config.json").is_file():
        try:
            _check_files(settings)
        except ValueError as error:
            sys.stderr.write(f"{PROGRAM}: error: {error}\n")
            return EXIT_CANNOT_START
    return EXIT_OK


def run(settings: WorkerSettings, load: LoadEngine) -> int:
    """Serve until a signal. Return the exit status."""

    def load_for_good(report: Report) -> LoadedEngine:
        loaded = load(report)
        search_rarely()
        return loaded

    async def serve() -> None:
        execution = settings.execution
        files = partial(files_identity, execution.model, execution.load_format)
        await WorkerService(settings, _version()).run(load_for_good, files)

    try:
        asyncio.run(serve())
    except CannotStart as error:
        logger.error("cannot start: %s", error)
        return EXIT_CANNOT_START
    except StoreRefused as error:
        logger.error("%s", error)
        return EXIT_CANNOT_START
    except Exception:
        logger.exception("worker: failed; peers take over its requests")
        return EXIT_FAILED
    return EXIT_OK


def load_engine(settings: WorkerSettings, report: Report) -> LoadedEngine:
    """Load the model and build the engine. Raises ValueError for a model or setting that cannot be served."""
    report = times = StartTimes(report)
    report("load", 0.0, "the checkpoint's headers")
    execution = settings.execution
    _check_files(settings)
    size = execution.tensor_parallel_size
    report("load", 0.0, "torch")
    followers = Followers(size) if size > 1 and not execution.rendezvous_endpoint else None
    with no_searches():
        import torch  # noqa: PLC0415 - see the module's docstring

        from engine_worker.execution.load.load import load_model_runner  # noqa: PLC0415
        from engine_worker.execution.load.speeds import decode_tokens_per_second  # noqa: PLC0415
        from engine_worker.model.devices import chosen_device  # noqa: PLC0415

    device = chosen_device(settings.execution.device, has_cuda=torch.cuda.is_available())
    settings = settings.for_device(device)
    drafts = draft_settings(settings.scheduling.speculation, settings.execution.model)
    runner = load_model_runner(settings.execution, report, followers, drafts)
    start = times.by_rank(runner.group)
    for line in log_lines(start):
        logger.info("start of %s", line)
    engine = Engine(
        _scheduler(settings, runner),
        runner,
        eos_token_ids=runner.model_spec.eos_token_ids,
        vocab_size=runner.model_spec.vocab_size,
        clock=time.perf_counter,
        async_scheduling=bool(settings.scheduling.async_scheduling),
    )
    on_cpu = "on the CPU: expect {:.0f} tokens/s of one stream"
    note = on_cpu.format(decode_tokens_per_second(runner)) if device == "cpu" else ""
    loaded = LoadedEngine(engine, _info(runner, device), runner.compile_grammar, note, start=start)
    if runner.group is None:
        return loaded
    return replace(loaded, dump_others=runner.group.dump_stacks, set_on_end=runner.group.set_on_end)


def _check_files(settings: WorkerSettings) -> None:
    execution = settings.execution
    check_files(
        execution.model,
        execution.model_impl,
        execution.load_format,
        execution.tensor_parallel_size,
        execution.quantization,
        execution.enable_expert_parallel,
        execution.max_model_len,
    )
    if (head := draft_settings(settings.scheduling.speculation, execution.model).head) is not None:
        check_draft_head(head, execution.model, execution.model_impl, execution.load_format)


def _info(runner: "ModelRunner", device: str) -> EngineInfo:
    """Return the engine's constants. `device`: `cpu` or `cuda`."""
    import torch  # noqa: PLC0415 - see the module's docstring

    from engine_worker.execution.step.memory import memory_by_use  # noqa: PLC0415

    return EngineInfo(
        device="gpu" if device == "cuda" else "cpu",
        dtype=runner.dtype_name,
        kv_cache_dtype=runner.kv_cache_dtype,
        quantization=runner.quantization,
        block_size_bytes=runner.block_bytes,
        max_model_len=runner.max_model_len,
        memory_bytes=partial(
            memory_by_use,
            torch.device(device),
            weights_bytes=runner.weights_bytes,
            kv_bytes=runner.kv_cache_bytes,
            host_kv_bytes=runner.num_host_blocks * runner.block_bytes
            + runner.num_host_state_blocks * runner.state_bytes,
        ),
        group=runner.group.health if runner.group is not None else lambda: ALONE,
    )


def _scheduler(settings: WorkerSettings, runner: "ModelRunner") -> Scheduler:
    bounds, scheduling = settings.execution.bounds, settings.scheduling
    config = SchedulerConfig(
        max_num_seqs=bounds.max_num_seqs,
        max_num_batched_tokens=bounds.max_num_batched_tokens,
        max_model_len=runner.max_model_len,
        max_prefill_tokens_with_decodes=scheduling.max_prefill_tokens_with_decodes,
    )
    kv_cache = KVCacheManager(
        runner.num_blocks,
        runner.block_size,
        windows=runner.windows,
        max_new_tokens=bounds.max_num_batched_tokens,
        enable_prefix_caching=scheduling.enable_prefix_caching,
        host_tier=host_tier_config(runner, scheduling),
        num_state_blocks=runner.num_state_blocks,
        events=KVEventLog(runner.block_bytes, time.time, KVDurations(time.monotonic)),
    )
    return Scheduler(config, kv_cache, _drafting(settings, kv_cache, runner.windows))


def _drafting(settings: WorkerSettings, kv_cache: KVCacheManager, windows: Sequence[int]) -> Drafting | None:
    speculation, bounds = settings.scheduling.speculation, settings.execution.bounds
    if speculation is None:
        return None
    return Drafting(
        PROPOSERS[speculation.method](speculation),
        kv_cache,
        DraftLimits(
            max_drafts=speculation.num_speculative_tokens,
            max_samples=bounds.max_num_samples,
            max_tokens=bounds.max_num_batched_tokens,
            may_run_ahead=bool(settings.scheduling.async_scheduling) and not any(windows),
        ),
        DraftGain(speculation.min_gain, runs_ahead=bool(settings.scheduling.async_scheduling)),
    )


def host_tier_config(runner: "ModelRunner", settings: SchedulingSettings) -> HostTierConfig | None:
    """Return the host tier's config with the runner's measured costs; None without a host pool."""
    if runner.speeds is None:
        return None
    costs = TransferCosts(
        block_bytes=runner.block_bytes,
        device_to_host_bytes_per_second=runner.speeds.device_to_host_bytes_per_second,
        host_to_device_bytes_per_second=runner.speeds.host_to_device_bytes_per_second,
        prefill_tokens_per_second=runner.speeds.prefill_tokens_per_second,
        fetch_seconds=FETCH_SECONDS,
        state_bytes=runner.state_bytes,
    )
    return HostTierConfig(
        num_blocks=runner.num_host_blocks,
        num_state_blocks=runner.num_host_state_blocks,
        preemption_mode=PreemptionMode(settings.preemption_mode),
        offloaded_prefixes=OffloadedPrefixes(settings.offloaded_prefixes),
        costs=costs,
    )


def _version() -> str:
    try:
        return version("pagestream")
    except PackageNotFoundError:  # run from a bare checkout
        return "unknown"


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # without cleanup, because the engine's thread may still be in native code
