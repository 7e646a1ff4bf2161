"""Load a ModelRunner from settings: load weights, size and allocate the KV cache, and warm up.

Each phase reports its progress. Runs on rank 0 of a group, and starts the other ranks (rank_group.py).
"""

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from engine_worker.execution.load.load_replica import (
    GRAPHS_SHARE,
    LoadPlan,
    load_plan,
    load_replica,
    prepare_process,
)
from engine_worker.execution.load.rank_group import RankGroup
from engine_worker.execution.load.spanning_group import SpanningGroup
from engine_worker.execution.load.speeds import measure_speeds
from engine_worker.execution.load.start_times import Report
from engine_worker.execution.load.step_memory import sample_largest
from engine_worker.execution.load.warmup import warm_up
from engine_worker.execution.ranks.follower_processes import Followers
from engine_worker.execution.ranks.replica_group import GroupDrafts, ReplicaGroup
from engine_worker.execution.sampling.sampler import Sampler
from engine_worker.execution.settings import NO_DRAFTS, DraftSettings, ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.execution.step.replica import StepReplica
from engine_worker.model.tensor_parallel import SINGLE

if TYPE_CHECKING:
    from engine_worker.execution.sampling.grammar_masks import GrammarMasks


def load_model_runner(
    settings: ExecutionSettings,
    report: Report,
    followers: Followers | None = None,
    drafts: DraftSettings = NO_DRAFTS,
) -> ModelRunner:
    """Load a model and return its runner, warmed up.

    Args:
        settings: What to load, and where.
        report: Called with (phase, progress from 0 to 1, detail).
        followers: Processes of a group on one host, if they were started before torch was imported here.
        drafts: How many tokens may be drafted, and by which head.

    Raises:
        ValueError: If settings, model, and machine do not fit together.
    """
    plan = load_plan(settings, drafts=drafts)
    prepare_process(plan.settings)
    group = _group(plan, report, followers) if settings.tensor_parallel_size > 1 else None
    config, bounds = plan.blueprint.shape, plan.settings.bounds
    grammars = _grammar_masks(plan)
    sampler = Sampler(config.vocab_size, config.eos_token_ids, bounds.max_num_samples, plan.device, grammars)
    ranks = group.tensor_parallel if group is not None else SINGLE
    try:
        loaded = load_replica(plan, report, ranks, partial(sample_largest, sampler))
    except RuntimeError:
        if group is not None:
            group.blame()
        raise
    replica: StepReplica = loaded.replica
    if group is not None:
        replica = ReplicaGroup(loaded.replica, ranks, group.channel, group.blame)
    maker = loaded.drafts
    if group is not None and maker is not None:
        maker = GroupDrafts(maker, group.channel, group.blame)
    runner = ModelRunner(replica, sampler, loaded.weights_bytes, maker, drafts.num_drafts)
    runner.group, runner.quantization = group, loaded.quantization
    for progress, detail in warm_up(runner, bounds):
        report("warmup", 1.0 - (1.0 - GRAPHS_SHARE) * (1.0 - progress), detail)
    runner.compile_grammar = grammars.compile if grammars is not None else None
    if runner.num_host_blocks:
        runner.speeds = measure_speeds(runner, bounds.max_num_batched_tokens)
    return runner


def _group(plan: LoadPlan, report: Report, followers: Followers | None) -> RankGroup | SpanningGroup:
    if plan.settings.rendezvous_endpoint:
        return SpanningGroup.start(plan, report)
    return RankGroup.start(plan, report, followers)


def _grammar_masks(plan: LoadPlan) -> "GrammarMasks | None":
    """Return None if llguidance is not installed; the worker then refuses grammars only."""
    if find_spec("llguidance") is None:
        return None
    from engine_worker.execution.sampling.grammar_compiler import GrammarCompiler  # noqa: PLC0415 - see above
    from engine_worker.execution.sampling.grammar_masks import GrammarMasks  # noqa: PLC0415

    config = plan.blueprint.shape
    compiler = GrammarCompiler(plan.settings.model, config.vocab_size, config.eos_token_ids)
    return GrammarMasks(compiler, config.vocab_size, plan.device)
