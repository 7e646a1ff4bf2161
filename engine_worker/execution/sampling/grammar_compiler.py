"""Compile grammars for the model's tokenizer and cache them, with least-recently-used eviction.

The tokenizer is read with the first grammar (0.7 s and 60 MB for 49,152 tokens), so a worker without grammars pays
nothing. The thread that compiles ahead and the engine's thread may ask for the same grammar.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from shared.grammars import GrammarError, guidance_text, parser_limits, shortened
from shared.messages import Grammar

MAX_CACHED_BYTES = 64 * 2**20
# Measured over 500 schemas of 1 kB: 129 kB each. The library does not report the size of a compiled grammar.
_BYTES_PER_TEXT_BYTE = 128
_BYTES_PER_GRAMMAR = 16 * 1024


class GrammarCompiler:
    def __init__(self, model: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Use the tokenizer in the directory `model`. `vocab_size` is the width of the logits."""
        self._tokenizer_file = model / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._cache_lock = threading.Lock()
        self._cache: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._cached_bytes = 0

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Return a matcher at the start of the grammar. Copy it; do not advance it.

        Raises:
            GrammarError: If the grammar is invalid, or the model's tokenizer cannot be used.
        """
        with self._cache_lock:
            compiled = self._cache.get(grammar)
            if compiled is not None:
                self._cache.move_to_end(grammar)
                return compiled
        compiled = self._compiled(grammar)
        with self._cache_lock:
            self._keep(grammar, compiled)
        return compiled

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(self._require_tokenizer(), guidance_text(grammar), log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise GrammarError(shortened(matcher.get_error()))
        return matcher

    def _keep(self, grammar: Grammar, compiled: LLMatcher) -> None:
        if grammar not in self._cache:
            self._cached_bytes += _cost_bytes(grammar)
        self._cache[grammar] = compiled
        while self._cached_bytes > MAX_CACHED_BYTES:
            dropped, _ = self._cache.popitem(last=False)
            self._cached_bytes -= _cost_bytes(dropped)

    def _require_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = self._read_tokenizer()
            return self._tokenizer

    def _read_tokenizer(self) -> LLTokenizer:
        if not self._eos_token_ids:
            raise GrammarError("the model has no end-of-sequence token, so a grammar could not end the text")
        try:
            text = self._tokenizer_file.read_text(encoding="utf-8")
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
        except (OSError, ValueError) as error:
            name = self._tokenizer_file.name
            raise GrammarError(f"this worker cannot read the model's {name}: {shortened(str(error))}") from error


def _cost_bytes(grammar: Grammar) -> int:
    return _BYTES_PER_GRAMMAR + _BYTES_PER_TEXT_BYTE * len(grammar.text.encode())
