"""SentencePiece's BPE as llama.cpp stores it: pieces with scores, `▁` for a space, one piece per byte.

SentencePiece merges the pair whose piece has the best score, while `tokenizers` merges by a list. The list has all
pairs of pieces that form a piece, best score first, as in transformers' generate_merges().
"""

from collections.abc import Iterator

from gguf import TokenType
from tokenizers import Tokenizer, decoders, models, normalizers

from engine_worker.gguf.metadata import GgufFile

_SPACE = "▁"
_MERGED = frozenset({TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED})


def sentence_piece_tokenizer(file: GgufFile) -> Tokenizer:
    """Build the tokenizer of a `llama` vocabulary."""
    tokens = file.required("tokenizer.ggml.tokens")
    scores, types = file.required("tokenizer.ggml.scores"), file.required("tokenizer.ggml.token_type")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merged = {token: score for token, score, type_ in zip(tokens, scores, types, strict=True) if type_ in _MERGED}
    unknown = next((token for token, type_ in zip(tokens, types, strict=True) if type_ == TokenType.UNKNOWN), None)
    unknown_id = file.get("tokenizer.ggml.unknown_token_id")
    if unknown_id is not None:
        unknown = tokens[unknown_id]
    result = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(merged, vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    result.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    result.decoder = decoders.Sequence(steps)
    return result


def _merges(scores: dict[str, float], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return all merges, best score first; among the pairs of one piece, the lowest ids first."""
    found = sorted(_pairs(scores), key=lambda pair: (-scores[pair[0] + pair[1]], ids[pair[0]], ids[pair[1]]))
    return found


def _pairs(scores: dict[str, float]) -> Iterator[tuple[str, str]]:
    for piece in scores:
        for cut in range(1, len(piece)):
            if piece[:cut] in scores and piece[cut:] in scores:
                yield piece[:cut], piece[cut:]
