"""Continue as this or an earlier text did, by as many tokens as the match is long.

Suffix decoding (https://arxiv.org/abs/2411.04975) without the tree: texts that agents repeat are found in the outputs
that ended last, of the same tenant only. A long match is likely to go on, so it gets more drafts.
"""

from collections import OrderedDict
from collections.abc import Iterable

from engine_worker.kv.sequence import Sequence
from engine_worker.scheduling.speculation.config import SpeculativeConfig
from engine_worker.scheduling.speculation.token_history import TokenHistory

_MIN_MATCH = 2  # tokens; a single one recurs by chance
_MAX_ENDED_TOKENS = 2**15  # kept per tenant: a search takes about 20 us
_MAX_TENANTS = 64


class SuffixProposer:
    def __init__(self, config: SpeculativeConfig) -> None:
        self._depth = config.suffix_decoding_max_tree_depth
        self._histories: dict[Sequence, TokenHistory] = {}
        self._ended: OrderedDict[bytes, TokenHistory] = OrderedDict()  # by cache root: only equal ones share texts

    def propose(self, sequence: Sequence, max_drafts: int) -> list[int]:
        own = self._histories.setdefault(sequence, TokenHistory())
        own.follow(sequence)
        found, match = own, own.longest_match(own.last(self._depth), max_drafts)
        if (ended := self._ended.get(sequence.kv.cache_root)) is not None:
            other = ended.longest_match(own.last(self._depth), max_drafts)
            if other.length > match.length:
                found, match = ended, other
        return found.after(match.end, min(max_drafts, match.length)) if match.length >= _MIN_MATCH else []

    def ended(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if self._histories.pop(sequence, None) is not None:
                self._keep(sequence)

    def _keep(self, sequence: Sequence) -> None:
        ended = self._ended.setdefault(sequence.kv.cache_root, TokenHistory())
        self._ended.move_to_end(sequence.kv.cache_root)
        ended.append(sequence.output_token_ids)
        ended.keep_last(_MAX_ENDED_TOKENS)
        while len(self._ended) > _MAX_TENANTS:
            self._ended.popitem(last=False)
