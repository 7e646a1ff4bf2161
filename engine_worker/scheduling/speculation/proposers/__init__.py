"""Proposers of drafts, one file each. `PROPOSERS` names them as `--speculative-config` does."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from engine_worker.scheduling.speculation.config import SpeculativeConfig
from engine_worker.scheduling.speculation.drafting import Proposer
from engine_worker.scheduling.speculation.proposers.executor import ExecutorProposer
from engine_worker.scheduling.speculation.proposers.ngram import NgramProposer
from engine_worker.scheduling.speculation.proposers.suffix import SuffixProposer

PROPOSERS: Mapping[str, Callable[[SpeculativeConfig], Proposer]] = MappingProxyType(
    {
        "ngram": NgramProposer,
        "ngram_gpu": ExecutorProposer,
        "suffix": SuffixProposer,
        "eagle3": ExecutorProposer,
        "mtp": ExecutorProposer,
    }
)
