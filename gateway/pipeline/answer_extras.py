"""Answer fields beyond OpenAI's, if requested: `echo`, `prompt_logprobs`, `prompt_token_ids`, and `token_ids`. Pure.

As in vLLM, a completion has them in each choice; a chat has those of its prompt beside the choices. A prompt's first
token has no log-probability. With max_tokens 0 the engine computes one token, which is dropped here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import structs

from gateway.pipeline.choice_writer import Backlog, ChoiceDelta, Stage, Write
from gateway.pipeline.request import CompletionRequest
from gateway.text.logprobs import LogprobEntry, prompt_logprobs
from gateway.text.long_json import LongArray
from gateway.text.token_spellings import TokenSpellings
from gateway.text.tokenization import PromptEncoder
from shared.messages import EncodedLogprobs, FinishReason

Scores = Mapping[int, EncodedLogprobs]
ENTRIES_OF_PIECE = 16  # half a millisecond of events, with 20 log-probabilities each
TOKENS_OF_STEP = 128  # that are read between two looks at whose turn it is: a millisecond at most


class PromptEcho:
    """A stage that puts each choice's prompt before it, with log-probabilities if the answer has them."""

    def __init__(
        self,
        encoder: PromptEncoder,
        request: CompletionRequest,
        prompts_token_ids: Sequence[list[int]],
        scores: Sequence[Scores],
        backlog: Backlog,
    ) -> None:
        """Create the stage; `scores` per prompt must be complete before its first delta."""
        self.next: Write = Stage().write
        self._encoder = encoder
        self._prompts = prompts_token_ids
        self._scores = scores
        self._backlog = backlog
        is_cut = request.fields.truncate_prompt_tokens is not None
        # By number of the prompt; those that came as ids are read when they are sent.
        self._texts = {
            number: prompt for number, prompt in enumerate(request.prompts) if isinstance(prompt, str) and not is_cut
        }
        self._num_choices = request.n
        self._drop_answers = request.max_tokens == 0
        self._begun: set[int] = set()
        self._spellings = encoder.spellings(by_id=bool(request.fields.return_tokens_as_token_ids))

    def write(self, delta: ChoiceDelta, out: bytearray) -> None:
        """Pass on the delta later, in pieces, because a prompt may be long."""
        self._backlog.append((self._pieces(delta), self.next))

    def _pieces(self, delta: ChoiceDelta) -> Iterator[ChoiceDelta | None]:
        """Yield the pieces of a delta, None while a long prompt is decoded. A choice's first piece has its prompt."""
        number = delta.index // self._num_choices
        if self._drop_answers:
            reason = None if delta.reason is None else FinishReason.LENGTH
            delta = structs.replace(delta, text="", logprobs=(), token_ids=(), reason=reason)
        yield from self._read(number)
        text = self._texts[number]
        moved = tuple(structs.replace(entry, text_offset=entry.text_offset + len(text)) for entry in delta.logprobs)
        if delta.index in self._begun:
            yield structs.replace(delta, logprobs=moved)
            return
        self._begun.add(delta.index)
        tokens, scores = self._prompts[number], self._scores[number]
        entries = prompt_entries(self._encoder, self._spellings, tokens, scores) if scores else iter(())
        own = tuple(islice(entries, ENTRIES_OF_PIECE))
        while following := tuple(islice(entries, ENTRIES_OF_PIECE)):
            yield ChoiceDelta(delta.index, text, None, own)
            text, own = "", following
        yield structs.replace(delta, text=text + delta.text, logprobs=(*own, *moved))

    def _read(self, number: int) -> Iterator[None]:
        """Decode a prompt once for all its choices, with a yield after each step."""
        if number in self._texts:
            return
        pieces: list[str] = []
        for step in _steps(self._encoder, self._prompts[number]):
            pieces += step
            yield
        self._texts[number] = "".join(pieces)


def _steps(encoder: PromptEncoder, token_ids: Sequence[int]) -> Iterator[Iterable[str]]:
    detokenizer = encoder.detokenizer((), skip_special_tokens=False)
    for start in range(0, len(token_ids), TOKENS_OF_STEP):
        yield map(detokenizer.push, token_ids[start : start + TOKENS_OF_STEP])
    yield [detokenizer.flush()]


def prompt_entries(
    encoder: PromptEncoder, spellings: TokenSpellings, token_ids: Sequence[int], scores: Scores
) -> Iterator[LogprobEntry]:
    """As those of an answer, each at its place in the prompt's text."""
    detokenizer = encoder.detokenizer((), skip_special_tokens=False)
    offset = 0
    for index, token_id in enumerate(token_ids):
        yield LogprobEntry(token_id, scores.get(index), offset, spellings)
        offset += len(detokenizer.push(token_id))


Fields = dict[str, Any]


class AnswerExtras:
    def __init__(
        self,
        request: CompletionRequest,
        encoder: PromptEncoder,
        prompts_token_ids: Sequence[list[int]],
        *,
        prompt_in_choice: bool,
    ) -> None:
        self._spellings = encoder.spellings(by_id=False)
        self._prompts = prompts_token_ids
        self._num_choices = request.n
        self._with_token_ids = bool(request.fields.return_token_ids)
        self._with_prompt_logprobs = request.fields.prompt_logprobs is not None
        self._prompt_in_choice = prompt_in_choice
        self._written: dict[int, LongArray] = {}  # scores, by number of the prompt

    def write_scores(self, scores: Sequence[Scores]) -> Iterator[None]:
        """Encode prompt log-probabilities in steps; must finish before of_answer() and of_choice() are called."""
        for number, token_ids in enumerate(self._prompts if self._with_prompt_logprobs else ()):
            written = self._written[number] = LongArray()
            for start in range(0, len(token_ids), ENTRIES_OF_PIECE):
                piece = token_ids[start : start + ENTRIES_OF_PIECE]
                written.extend(prompt_logprobs(self._spellings, piece, scores[number], start))
                yield

    def of_answer(self) -> Fields:
        return {} if self._prompt_in_choice else self._of_prompt(0)

    def of_choice(self, index: int, token_ids: Sequence[int]) -> Fields:
        fields = self._of_tokens(token_ids)
        if self._prompt_in_choice:
            fields |= self._of_prompt(index // self._num_choices)
        return fields

    def of_first_chunk(self) -> Fields:
        """Fields of the first chunk of each choice as a whole."""
        return {} if self._prompt_in_choice else self._of_prompt(0)

    def of_chunk(self, delta: ChoiceDelta, *, is_first: bool) -> Fields:
        """Fields of the choice in a chunk; `is_first`: it has text or tokens for the first time."""
        fields = self._of_tokens(delta.token_ids)
        if is_first and self._prompt_in_choice:
            fields |= self._of_prompt(delta.index // self._num_choices)
        return fields

    def _of_tokens(self, token_ids: Sequence[int]) -> Fields:
        return {"token_ids": list(token_ids)} if self._with_token_ids else {}

    def _of_prompt(self, number: int) -> Fields:
        fields: Fields = {"prompt_token_ids": self._prompts[number]} if self._with_token_ids else {}
        if self._with_prompt_logprobs:  # never of a stream
            fields["prompt_logprobs"] = self._written[number]
        return fields
