"""What an answer tells of its prompt: the prompt itself before each choice (`echo`), its log-probabilities, its ids.

A prompt's first token has no log-probability: nothing stands before it. With max_tokens 0 the engine computes one
token, which is dropped here. Knows nothing of streams or JSON text.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from msgspec import structs

from gateway.answers.choice_progress import ChoiceUpdate
from gateway.requests.openai_schema import CompletionRequest
from gateway.text.logprobs import LogprobEntry
from gateway.text.token_spellings import TokenSpellings
from gateway.text.tokenization import PromptEncoder
from shared.messages import FinishReason, TokenLogprobs

Scores = Mapping[int, TokenLogprobs]
ENTRIES_OF_PIECE = 16  # 3 ms of events, with 20 log-probabilities each


class PromptEcho:
    """Puts each choice's prompt before it; scored, if the answer is."""

    def __init__(
        self, encoder: PromptEncoder, request: CompletionRequest, prompts_token_ids: Sequence[list[int]]
    ) -> None:
        self._encoder = encoder
        self._prompts = prompts_token_ids
        is_cut = request.fields.truncate_prompt_tokens is not None
        self._texts = [
            prompt if isinstance(prompt, str) and not is_cut else encoder.decode(token_ids, skip_special_tokens=False)
            for prompt, token_ids in zip(request.prompts, prompts_token_ids, strict=True)
        ]
        self._num_choices = request.n
        self._drop_answers = request.max_tokens == 0
        self._begun: set[int] = set()
        self._spellings = encoder.spellings(by_id=bool(request.fields.return_tokens_as_token_ids))
        self._untold = deque[tuple[ChoiceUpdate, Iterator[ChoiceUpdate]]]()  # the next one, and those behind it

    def take(self, updates: Sequence[ChoiceUpdate], scores: Sequence[Scores]) -> None:
        """What ready() tells then. `scores` of each prompt; they are whole before its first update."""
        for update in updates:
            pieces = self._pieces(update, scores[update.index // self._num_choices])
            self._untold.append((next(pieces), pieces))

    def ready(self) -> Iterator[list[ChoiceUpdate]]:
        """Who stops reading goes on with the next one."""
        while self._untold:
            update, pieces = self._untold.popleft()
            if (following := next(pieces, None)) is not None:
                self._untold.appendleft((following, pieces))
            yield [update]

    @property
    def is_told(self) -> bool:
        return not self._untold

    def _pieces(self, update: ChoiceUpdate, scores: Scores) -> Iterator[ChoiceUpdate]:
        """At least one. The first of a choice has its prompt's text; the scores of a long prompt come in several."""
        number = update.index // self._num_choices
        if self._drop_answers:
            reason = None if update.reason is None else FinishReason.LENGTH
            update = structs.replace(update, text="", logprobs=(), token_ids=(), reason=reason)
        text = self._texts[number]
        moved = tuple(structs.replace(entry, text_offset=entry.text_offset + len(text)) for entry in update.logprobs)
        if update.index in self._begun:
            yield structs.replace(update, logprobs=moved)
            return
        self._begun.add(update.index)
        tokens = self._prompts[number]
        entries = prompt_entries(self._encoder, self._spellings, tokens, scores) if scores else iter(())
        own = tuple(islice(entries, ENTRIES_OF_PIECE))
        while following := tuple(islice(entries, ENTRIES_OF_PIECE)):
            yield ChoiceUpdate(update.index, text, None, own)
            text, own = "", following
        yield structs.replace(update, text=text + update.text, logprobs=(*own, *moved))


def prompt_echo(
    encoder: PromptEncoder, request: CompletionRequest, prompts_token_ids: Sequence[list[int]]
) -> PromptEcho | None:
    """None: the request does not ask for it."""
    return PromptEcho(encoder, request, prompts_token_ids) if request.echo else None


def prompt_entries(
    encoder: PromptEncoder, spellings: TokenSpellings, token_ids: Sequence[int], scores: Scores
) -> Iterator[LogprobEntry]:
    """As those of an answer, each at its place in the prompt's text."""
    detokenizer = encoder.detokenizer((), skip_special_tokens=False)
    offset = 0
    for index, token_id in enumerate(token_ids):
        yield LogprobEntry(token_id, scores.get(index), offset, spellings)
        offset += len(detokenizer.push(token_id))
