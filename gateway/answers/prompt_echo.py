"""What an answer tells of its prompt: the prompt itself before each choice (`echo`), its log-probabilities, its ids.

A prompt's first token has no log-probability: nothing stands before it. With max_tokens 0 the engine computes one
token, which is dropped here. Knows nothing of streams or JSON text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from gateway.answers.choice_progress import ChoiceUpdate
from gateway.requests.openai_schema import CompletionRequest
from gateway.text.logprobs import LogprobEntry, ScoredTokens
from gateway.text.tokenization import PromptEncoder
from shared.messages import FinishReason, TokenLogprobs

Scores = Mapping[int, TokenLogprobs]


class PromptEcho:
    """Puts each choice's prompt before it; scored, if the answer is."""

    def __init__(
        self, encoder: PromptEncoder, request: CompletionRequest, prompts_token_ids: Sequence[list[int]]
    ) -> None:
        self._encoder = encoder
        self._prompts = prompts_token_ids
        is_cut = request.fields.truncate_prompt_tokens is not None
        self._texts = [
            prompt
            if isinstance(prompt, str) and not is_cut
            else encoder.decode(token_ids, skip_special_tokens=False)
            for prompt, token_ids in zip(request.prompts, prompts_token_ids, strict=True)
        ]
        self._num_choices = request.n
        self._drop_answers = request.max_tokens == 0
        self._begun: set[int] = set()
        self._scored_tokens = ScoredTokens(encoder.token_bytes, by_id=bool(request.fields.return_tokens_as_token_ids))

    def applied_to(self, updates: Sequence[ChoiceUpdate], scores: Sequence[Scores]) -> list[ChoiceUpdate]:
        """`scores` of each prompt; they are whole before its first update."""
        return [self._applied(update, scores[update.index // self._num_choices]) for update in updates]

    def _applied(self, update: ChoiceUpdate, scores: Scores) -> ChoiceUpdate:
        number = update.index // self._num_choices
        if self._drop_answers:
            reason = None if update.reason is None else FinishReason.LENGTH
            update = structs.replace(update, text="", logprobs=(), token_ids=(), reason=reason)
        text = self._texts[number]
        moved = tuple(replace(entry, text_offset=entry.text_offset + len(text)) for entry in update.logprobs)
        if update.index in self._begun:
            return structs.replace(update, logprobs=moved)
        self._begun.add(update.index)
        own = prompt_entries(self._encoder, self._scored_tokens, self._prompts[number], scores) if scores else ()
        return structs.replace(update, text=text + update.text, logprobs=(*own, *moved))


def prompt_echo(
    encoder: PromptEncoder, request: CompletionRequest, prompts_token_ids: Sequence[list[int]]
) -> PromptEcho | None:
    """None: the request does not ask for it."""
    return PromptEcho(encoder, request, prompts_token_ids) if request.echo else None


def prompt_entries(
    encoder: PromptEncoder, scored_tokens: ScoredTokens, token_ids: Sequence[int], scores: Scores
) -> tuple[LogprobEntry, ...]:
    """As those of an answer, each at its place in the prompt's text."""
    detokenizer = encoder.detokenizer((), skip_special_tokens=False)
    entries = []
    offset = 0
    for index, token_id in enumerate(token_ids):
        entries.append(
            scored_tokens.entry(token_id, scores[index], offset)
            if index in scores
            else LogprobEntry(scored_tokens.scored(token_id, None), (), offset)
        )
        offset += len(detokenizer.push(token_id))
    return tuple(entries)


def prompt_logprobs_object(
    encoder: PromptEncoder, token_ids: Sequence[int], scores: Scores
) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each token {id: {logprob, rank, decoded_token}}, the likeliest and itself; null for the first.

    The rank of a token that is not among the likeliest ones reported is null: it is not known.
    """

    def entry(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        decoded = encoder.token_bytes.of(token_id).decode(errors="replace")
        return {"logprob": max(logprob, -9999.0), "rank": rank, "decoded_token": decoded}

    def of(index: int) -> dict[str, Any] | None:
        score = scores.get(index)
        if score is None:
            return None
        top = zip(score.top_token_ids, score.top_logprobs, strict=True)
        entries = {str(id_): entry(id_, logprob, rank) for rank, (id_, logprob) in enumerate(top, start=1)}
        chosen = token_ids[index]
        entries.setdefault(str(chosen), entry(chosen, score.logprob, None))
        return entries

    return [of(index) for index in range(len(token_ids))]
