"""Fields of an answer beyond OpenAI's, for requests that ask: `token_ids`, `prompt_token_ids`, `prompt_logprobs`.

As in vLLM a completion has them in each choice, a chat has those of its prompt beside the choices. Pure.
"""

from collections.abc import Sequence
from typing import Any

from gateway.answers.choice_progress import ChoiceUpdate
from gateway.answers.prompt_echo import Scores
from gateway.requests.openai_schema import CompletionRequest
from gateway.text.logprobs import prompt_logprobs
from gateway.text.tokenization import PromptEncoder

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

    def __bool__(self) -> bool:
        """Whether there is anything to tell: asked once a token."""
        return self._with_token_ids or self._with_prompt_logprobs

    def of_answer(self, scores: Sequence[Scores]) -> Fields:
        return {} if self._prompt_in_choice else self._of_prompt(0, scores[0])

    def of_choice(self, index: int, token_ids: Sequence[int], scores: Sequence[Scores]) -> Fields:
        fields = self._of_tokens(token_ids)
        if self._prompt_in_choice:
            number = index // self._num_choices
            fields |= self._of_prompt(number, scores[number])
        return fields

    def of_first_chunk(self) -> Fields:
        """Of the first chunk of each choice as a whole."""
        return {} if self._prompt_in_choice else self._of_prompt(0, {})

    def of_chunk(self, update: ChoiceUpdate, *, is_first: bool) -> Fields:
        """Of the choice in a chunk; `is_first`: it has text or tokens for the first time."""
        fields = self._of_tokens(update.token_ids)
        if is_first and self._prompt_in_choice:
            fields |= self._of_prompt(update.index // self._num_choices, {})
        return fields

    def _of_tokens(self, token_ids: Sequence[int]) -> Fields:
        return {"token_ids": list(token_ids)} if self._with_token_ids else {}

    def _of_prompt(self, number: int, scores: Scores) -> Fields:
        token_ids = self._prompts[number]
        fields: Fields = {"prompt_token_ids": token_ids} if self._with_token_ids else {}
        if self._with_prompt_logprobs:
            fields["prompt_logprobs"] = prompt_logprobs(self._spellings, token_ids, scores)
        return fields
