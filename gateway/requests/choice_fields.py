"""How many choices are answered, of how many candidates, and how they are found: n, best_of, the beam fields. Pure.

    n                                 that many samples
    n, best_of                        best_of samples, the n most likely of them answered
    use_beam_search, best_of or n     a beam search of that width, its n best answered

The names are vLLM's. Beam search does not sample and looks at the model's own probabilities, so what changes either is
refused beside it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from gateway.errors import InvalidRequest
from gateway.requests.request_body import is_neutral

MAX_SAMPLES = 8  # of one prompt
MAX_BEAM_WIDTH = 64

# field -> its values that change nothing, null aside
_NEUTRAL_IN_BEAM_SEARCH: dict[str, tuple[Any, ...]] = {
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "stop": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logprob_token_ids": ([],),
}
_ONLY_IN_BEAM_SEARCH: dict[str, tuple[Any, ...]] = {"length_penalty": (1.0,), "early_stopping": (False,)}


@dataclass(frozen=True, slots=True)
class ChoiceCount:
    n: int  # answered
    num_candidates: int  # computed: best_of, or the width of the beam search
    use_beam_search: bool
    length_penalty: float
    early_stopping: bool | Literal["never"]

    @property
    def is_best_of(self) -> bool:
        """Whether samples are ranked, and some of them left out."""
        return not self.use_beam_search and self.num_candidates > self.n


def choice_count(fields: Any) -> ChoiceCount:
    """`fields`: GenerationFields, whose types are checked already. Raises InvalidRequest."""
    n = fields.n or 1
    use_beam_search = bool(fields.use_beam_search)
    num_candidates = n if fields.best_of is None else fields.best_of
    for param, problem in _problems(fields, n, num_candidates, use_beam_search):
        raise InvalidRequest(f"{param}: {problem}.", param=param)
    return ChoiceCount(
        n=n,
        num_candidates=num_candidates,
        use_beam_search=use_beam_search,
        length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
        early_stopping=fields.early_stopping or False,
    )


def _problems(fields: Any, n: int, num_candidates: int, use_beam_search: bool) -> Iterator[tuple[str, str]]:
    most = MAX_BEAM_WIDTH if use_beam_search else MAX_SAMPLES
    if n > most:
        yield "n", f"expected `int` <= {most}; got {n}"
    if num_candidates > most:
        yield "best_of", f"expected `int` <= {most}; got {num_candidates}"
    if num_candidates < n:
        yield "best_of", f"expected at least n, which is {n}; got {num_candidates}"
    not_beside = _NEUTRAL_IN_BEAM_SEARCH if use_beam_search else _ONLY_IN_BEAM_SEARCH
    for param, neutral in not_beside.items():
        value = getattr(fields, param, None)
        if value is not None and not is_neutral(value, neutral):
            values = "".join(f", or {allowed!r}" for allowed in neutral)
            where = "with use_beam_search" if use_beam_search else "without use_beam_search"
            yield param, f"has no meaning {where}; leave it out{values}"
