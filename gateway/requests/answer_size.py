"""How much one answer may hold: its tokens, and every log-probability that is told beside them, in one sum. Pure.

Prompts, choices, tokens and log-probabilities are each within limits of their own, but what the store's journal, this
gateway and the answer's body hold is their product. A value is about 14 bytes of a journal, 70 of a body and 300 of
memory while the body is made: 2**19 of them are a tenth of the longest journal that is read, and 150 MB here.
"""

from collections.abc import Sequence

from gateway.errors import InvalidRequest
from gateway.requests.openai_schema import CompletionRequest

MAX_VALUES = 2**19


def most_tokens(request: CompletionRequest, prompts_token_ids: Sequence[list[int]]) -> int:
    """That each choice may have, at least 1. Raises InvalidRequest where what is told of the prompts leaves no room."""
    num_told = _told_of_prompts(request, sum(map(len, prompts_token_ids)))
    most = (MAX_VALUES - num_told) // (_num_choices(request) * _values_of_token(request))
    if most < 1:
        param = "prompt_logprobs" if request.fields.prompt_logprobs is not None else request.prompt_param
        raise InvalidRequest(
            f"{param}: prompts of {sum(map(len, prompts_token_ids))} tokens, with what is to be told of each, are "
            f"{num_told} values in the answer; it has at most {MAX_VALUES}. Send fewer prompts, or ask for fewer "
            "log-probabilities.",
            param=param,
        )
    return most


def check_size(request: CompletionRequest, max_tokens: int, most: int) -> None:
    """`most`: of most_tokens(). Raises InvalidRequest."""
    if max_tokens > most:
        param = request.max_tokens_param
        raise InvalidRequest(
            f"{param}: {max_tokens} tokens of {_num_choices(request)} choices, with {_values_of_token(request) - 1} "
            f"log-probabilities each, are more than {MAX_VALUES} values in the answer; at most {most} tokens here.",
            param=param,
        )


def _num_choices(request: CompletionRequest) -> int:
    """Those that the engine tells of: the rest of a beam search is dropped there."""
    choices = request.choices
    return len(request.prompts) * (choices.n if choices.use_beam_search else choices.num_candidates)


def _values_of_token(request: CompletionRequest) -> int:
    """The token, its own log-probability, those of the likeliest or of the named ones."""
    if request.num_logprobs is None:
        return 2 if request.choices.is_best_of else 1
    return 2 + max(request.num_logprobs, len(request.fields.logprob_token_ids or ()))


def _told_of_prompts(request: CompletionRequest, num_tokens: int) -> int:
    """Each choice of a text completion repeats what is told of its prompt."""
    scores = request.num_prompt_logprobs
    if scores is None and not request.echo and not request.fields.return_token_ids:
        return 0
    times = 1 if request.is_chat else request.n
    return num_tokens * times * (1 if scores is None else 2 + scores)
