"""Log-probabilities in the formats of the APIs, as JSON built from cached pieces per token. Pure.

    entry = LogprobEntry(token_id, scores, text_offset, spellings)     one output token
    chat_logprobs(entries)          {"content": [{token, bytes, logprob, top_logprobs: [...]}], "refusal": null}
    event_logprobs(entries)         [{token, logprob, top_logprobs: [...]}], for events of the Responses API
    completion_logprobs(entries)    {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    prompt_logprobs(...)            [null, {"123": {decoded_token, logprob, rank}, ...}, ...], as in vLLM

`token` is the decoded bytes of the token alone, with U+FFFD for parts of a character, or its id with
`return_tokens_as_token_ids`; `bytes` is exact. The token that ends a sequence is listed in completions, as in vLLM, and
in a chat only if its text is shown, as at OpenAI. Tokens up to the end of a stop string are listed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from gateway.text.token_spellings import SpellingTable, TokenSpellings
from shared.messages import MAX_LOGPROBS, EncodedLogprobs, TokenLogprobs, decoded_logprobs, encoded_logprobs

# OpenAI's value for probability 0, because JSON has no infinity.
_MIN_LOGPROB = -9999.0

_encode = msgspec.json.encode

# JSON around the most likely tokens of a prompt position, by their number. The prompt's own token comes last, with rank
# null if it is not among them (_ENDS).
_BEGINS = [[b",{", *[b","] * (count - 1)] for count in range(MAX_LOGPROBS + 2)]
_ENDS_LISTED = [
    [*[b',"rank":%d}' % rank for rank in range(1, count)], b',"rank":%d}}' % count] for count in range(MAX_LOGPROBS + 1)
]
_ENDS = [
    [*[b',"rank":%d}' % rank for rank in range(1, count + 1)], b',"rank":null}}'] for count in range(MAX_LOGPROBS + 1)
]


class LogprobEntry(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    scores: EncodedLogprobs | None  # None for the first token of a prompt
    text_offset: int  # in characters, in the text of the choice
    spellings: TokenSpellings


def with_own_first(token_id: int, encoded: EncodedLogprobs) -> EncodedLogprobs:
    """Return scores whose most likely tokens begin with the token itself."""
    (scores,) = decoded_logprobs([encoded])
    others = [one for one in zip(scores.top_token_ids, scores.top_logprobs, strict=True) if one[0] != token_id]
    token_ids, logprobs = zip((token_id, scores.logprob), *others, strict=True)
    return encoded_logprobs(TokenLogprobs(scores.logprob, token_ids, logprobs))


def chat_logprobs(entries: Sequence[LogprobEntry]) -> dict[str, Any]:
    objects = (_object(entry.spellings.tokens_with_bytes, entry.token_id, score) for entry, score in _scored(entries))
    return {"content": msgspec.Raw(_joined(objects)), "refusal": None}


def event_logprobs(entries: Sequence[LogprobEntry]) -> msgspec.Raw:
    return msgspec.Raw(
        _joined(_object(entry.spellings.tokens, entry.token_id, score) for entry, score in _scored(entries))
    )


def completion_logprobs(entries: Sequence[LogprobEntry]) -> dict[str, Any]:
    """Return the format of completions.

    `top_logprobs` includes the chosen token, as at OpenAI. Of two tokens with equal text it keeps the more likely one.
    """
    scored = list(_scored(entries))
    return {
        "tokens": [entry.spellings.texts[entry.token_id] for entry in entries],
        "token_logprobs": [None if score is None else max(score.logprob, _MIN_LOGPROB) for _, score in scored],
        "top_logprobs": [
            None if score is None else _by_text(entry.spellings.texts, entry.token_id, score) for entry, score in scored
        ],
        "text_offset": [entry.text_offset for entry in entries],
    }


def prompt_logprobs(
    spellings: TokenSpellings, token_ids: Sequence[int], scores: Mapping[int, EncodedLogprobs], start: int
) -> bytes:
    """Return the format of prompt_logprobs: per token the most likely tokens and the token itself.

    The first token of a prompt is null. A token's rank is null if it is not among the reported tokens.

    Args:
        spellings: Cached JSON of tokens.
        token_ids: Tokens of the prompt.
        scores: Log-probabilities by index in the prompt.
        start: Index of the first of `token_ids`.
    """
    known = _decoded([scores.get(index) for index in range(start, start + len(token_ids))])
    runs = groupby(zip(token_ids, known, strict=True), key=lambda token: token[1] is None)
    return _joined(
        b",".join([b"null"] * len(list(run))) if is_unknown else _ranked(spellings, list(run))
        for is_unknown, run in runs
    )


def _scored(entries: Sequence[LogprobEntry]) -> Iterator[tuple[LogprobEntry, TokenLogprobs | None]]:
    return zip(entries, _decoded([entry.scores for entry in entries]), strict=True)


def _decoded(scores: Sequence[EncodedLogprobs | None]) -> Iterator[TokenLogprobs | None]:
    known = iter(decoded_logprobs([score for score in scores if score is not None]))
    return (None if score is None else next(known) for score in scores)


def _joined(items: Iterable[bytes]) -> bytes:
    return b"[" + b",".join(items) + b"]"


def _object(heads: SpellingTable[bytes], token_id: int, scores: TokenLogprobs | None) -> bytes:
    head = heads[token_id][2:]
    if scores is None:
        return head + b'null,"top_logprobs":[]}'
    own, *numbers = _numbers([scores.logprob, *scores.top_logprobs])
    top = b"".join(_interleaved(heads.all_of(scores.top_token_ids), numbers))[2:]
    return b'%b%b,"top_logprobs":[%b]}' % (head, own, top + b"}" if top else b"")


def _by_text(texts: SpellingTable[str], token_id: int, scores: TokenLogprobs) -> dict[str, float]:
    token_ids, logprobs = scores.top_token_ids, _finite(scores.top_logprobs)
    if token_id not in token_ids:
        token_ids, logprobs = (*token_ids, token_id), (*logprobs, max(scores.logprob, _MIN_LOGPROB))
    by_text = dict(zip(texts.all_of(token_ids), logprobs, strict=True))
    if len(by_text) < len(token_ids):  # keep the first token of each text
        by_text.update(zip(reversed(texts.all_of(token_ids)), reversed(logprobs), strict=True))
    return by_text


def _ranked(spellings: TokenSpellings, run: Sequence[tuple[int, TokenLogprobs | None]]) -> bytes:
    """Return the objects of a run of tokens without outer brackets; one join for all takes 2 us instead of 5 each."""
    token_ids, logprobs, begins, ends = list[int](), list[float](), list[bytes](), list[bytes]()
    for token_id, score in run:
        assert score is not None
        num_top = len(score.top_token_ids)
        token_ids += score.top_token_ids
        logprobs += score.top_logprobs
        is_listed = token_id in score.top_token_ids
        if not is_listed:
            token_ids.append(token_id)
            logprobs.append(score.logprob)
        begins += _BEGINS[num_top + (not is_listed)]
        ends += _ENDS_LISTED[num_top] if is_listed else _ENDS[num_top]
    return b"".join(_interleaved(begins, spellings.decoded_by_id.all_of(token_ids), _numbers(logprobs), ends))[1:]


def _numbers(logprobs: Sequence[float]) -> list[bytes]:
    """Return JSON numbers; `logprobs` must not be empty."""
    return _encode(_finite(logprobs))[1:-1].split(b",")


def _finite(logprobs: Sequence[float]) -> Sequence[float]:
    if min(logprobs, default=0.0) < _MIN_LOGPROB:
        return [max(logprob, _MIN_LOGPROB) for logprob in logprobs]
    return logprobs


def _interleaved(*columns: Sequence[bytes]) -> list[bytes]:
    """Interleave columns of equal length: the first of each, the second of each, and so on."""
    pieces = [b""] * (len(columns) * len(columns[0]))
    for place, column in enumerate(columns):
        pieces[place :: len(columns)] = column
    return pieces
